//! Writes a trace in the Trace Event Format, which Perfetto and Chromium's `chrome://tracing` open.
//!
//! Complete events only ("X"), which every viewer draws: the chunks of a drive overlap, so they are spread over lanes.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};

use super::{Chunk, Slice, Trace, phase_name, priority_name};

/// Process and thread of the compute thread.
const COMPUTE: (u64, u64) = (1, 1);
/// The drives.
const DRIVES: u64 = 2;
/// Threads of a source: one for each lane.
const LANES: u64 = 1000;

#[derive(Serialize)]
struct ChromeEvent<'a> {
    ph: &'static str,
    pid: u64,
    tid: u64,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Value,
}

/// The unit of the format, larger by the noise of a float, so that these nanoseconds come back also where a viewer cuts off what is less
/// than one: if an outer slice lost one that its inner slice keeps, they would cross, and such slices are dropped.
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0 * (1.0 + 4.0 * f64::EPSILON)
}

struct Events<W> {
    out: W,
    first: bool,
}

impl<W: Write> Events<W> {
    fn put(&mut self, event: &ChromeEvent<'_>) -> io::Result<()> {
        let between = if self.first { "\n" } else { ",\n" };
        self.first = false;
        self.out.write_all(between.as_bytes())?;
        serde_json::to_writer(&mut self.out, event)?;
        Ok(())
    }

    /// A name or an order ("M").
    fn meta(&mut self, name: &str, (pid, tid): (u64, u64), args: Value) -> io::Result<()> {
        self.put(&ChromeEvent {
            ph: "M",
            pid,
            tid,
            name,
            cat: None,
            ts: None,
            dur: None,
            args,
        })
    }

    fn slice(
        &mut self,
        name: &str,
        cat: &'static str,
        (pid, tid): (u64, u64),
        (begin, end): (u64, u64),
        args: Value,
    ) -> io::Result<()> {
        self.put(&ChromeEvent {
            ph: "X",
            pid,
            tid,
            name,
            cat: Some(cat),
            ts: Some(micros(begin)),
            dur: Some(micros(end.saturating_sub(begin))),
            args,
        })
    }

    fn counter(&mut self, name: &str, pid: u64, at: u64, args: Value) -> io::Result<()> {
        self.put(&ChromeEvent {
            ph: "C",
            pid,
            tid: 0,
            name,
            cat: None,
            ts: Some(micros(at)),
            dur: None,
            args,
        })
    }
}

impl Trace {
    /// Writes the trace as one JSON object in the Trace Event Format.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_chrome(&self, mut out: impl Write) -> io::Result<()> {
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
        let about = json!({
            "program": concat!("colibri-uring ", env!("CARGO_PKG_VERSION")),
            "full": self.lost > 0,
            "lost": self.lost,
        });
        serde_json::to_writer(&mut out, &about)?;
        out.write_all(b",\"traceEvents\":[")?;
        let mut events = Events { out, first: true };
        self.put_compute(&mut events)?;
        self.put_drives(&mut events)?;
        self.put_counters(&mut events)?;
        events.out.write_all(b"\n]}\n")?;
        events.out.flush()
    }

    fn put_compute(&self, events: &mut Events<impl Write>) -> io::Result<()> {
        events.meta("process_name", (COMPUTE.0, 0), json!({"name": "compute"}))?;
        events.meta(
            "process_sort_index",
            (COMPUTE.0, 0),
            json!({"sort_index": 1}),
        )?;
        events.meta("thread_name", COMPUTE, json!({"name": "compute thread"}))?;
        // Outer slices come before what is in them: viewers nest them by time, and in this order where times are equal.
        for of_pass in self.slices.chunk_by(|a, b| a.pass == b.pass) {
            let pass = self.passes.get(of_pass[0].pass);
            let name = match pass {
                Some(pass) if pass.tokens == 1 => format!("token {}", pass.position),
                Some(pass) => format!(
                    "tokens {} to {}",
                    pass.position,
                    (pass.position + pass.tokens).saturating_sub(1)
                ),
                None => "tokens".to_owned(),
            };
            events.slice(&name, "token", COMPUTE, span(of_pass), json!({}))?;
            for of_layer in of_pass.chunk_by(|a, b| a.layer == b.layer) {
                if let Some(layer) = of_layer[0].layer {
                    let name = format!("layer {layer}");
                    events.slice(
                        &name,
                        "layer",
                        COMPUTE,
                        span(of_layer),
                        json!({"layer": layer}),
                    )?;
                }
                for slice in of_layer {
                    let (name, args) = match slice.expert {
                        Some((expert, down)) => {
                            let part = if down { "down" } else { "gate_up" };
                            let args =
                                json!({"layer": slice.layer, "expert": expert, "part": part});
                            (format!("expert {expert} {part}"), args)
                        }
                        None => (
                            phase_name(slice.phase).to_owned(),
                            json!({"layer": slice.layer}),
                        ),
                    };
                    let category = phase_name(slice.phase);
                    events.slice(&name, category, COMPUTE, (slice.begin, slice.end), args)?;
                }
            }
        }
        Ok(())
    }

    fn put_drives(&self, events: &mut Events<impl Write>) -> io::Result<()> {
        events.meta("process_name", (DRIVES, 0), json!({"name": "drives"}))?;
        events.meta("process_sort_index", (DRIVES, 0), json!({"sort_index": 0}))?;
        let (lane_of, lanes) = self.lanes();
        for (source, lanes) in lanes.iter().enumerate() {
            for lane in 0..*lanes {
                let (source_name, at) = (self.source(source), (DRIVES, thread(source, lane)));
                let name = format!("{source_name} #{}", lane + 1);
                events.meta("thread_name", at, json!({"name": name}))?;
                events.meta("thread_sort_index", at, json!({"sort_index": at.1}))?;
            }
        }
        for (chunk, lane) in self.chunks.iter().zip(lane_of) {
            let part = part_name(chunk);
            let name = match chunk.key {
                Some(key) => format!("{}:{} {part}", key.layer, key.expert),
                None => part.to_owned(),
            };
            let args = json!({
                "layer": chunk.key.map(|key| key.layer),
                "expert": chunk.key.map(|key| key.expert),
                "part": part,
                "priority": priority_name(chunk.priority),
                "replica": self.source(chunk.source),
                "bytes": chunk.bytes,
            });
            let at = (DRIVES, thread(chunk.source, lane));
            let category = priority_name(chunk.priority);
            events.slice(&name, category, at, (chunk.begin, chunk.end), args)?;
        }
        Ok(())
    }

    fn put_counters(&self, events: &mut Events<impl Write>) -> io::Result<()> {
        for (source, name) in self.sources.iter().enumerate() {
            let counter = format!("in flight: {name}");
            for (at, bytes) in self.in_flight(source) {
                events.counter(&counter, DRIVES, at, json!({"bytes": bytes}))?;
            }
        }
        let (mut hits, mut misses) = (0u64, 0u64);
        for demand in &self.demands {
            hits += u64::from(demand.hits);
            misses += u64::from(demand.misses);
            let args = json!({"hits": hits, "misses": misses});
            events.counter("experts", COMPUTE.0, demand.at, args)?;
        }
        Ok(())
    }

    /// When the bytes that a source has at once change, and to what.
    fn in_flight(&self, source: usize) -> Vec<(u64, u64)> {
        let of_source = self.chunks.iter().filter(|chunk| chunk.source == source);
        let mut changes: Vec<(u64, bool, u64)> = of_source
            .flat_map(|c| [(c.begin, true, c.bytes), (c.end, false, c.bytes)])
            .collect();
        changes.sort_unstable();
        let mut bytes = 0u64;
        let mut points: Vec<(u64, u64)> = Vec::new();
        for (at, more, of_chunk) in changes {
            bytes = if more {
                bytes + of_chunk
            } else {
                bytes.saturating_sub(of_chunk)
            };
            match points.last_mut() {
                Some(last) if last.0 == at => last.1 = bytes,
                _ => points.push((at, bytes)),
            }
        }
        points
    }
}

fn span(slices: &[Slice]) -> (u64, u64) {
    (slices[0].begin, slices[slices.len() - 1].end)
}

fn thread(source: usize, lane: usize) -> u64 {
    (source as u64 + 1) * LANES + lane as u64
}

fn part_name(chunk: &Chunk) -> &'static str {
    match chunk.parts {
        [_, false] => "gate_up",
        [false, true] => "down",
        [true, true] => "gate_up+down",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_come_back_rounded_or_cut_off() {
        let hour = 3_600_000_000_000;
        for nanos in (0..5000).chain(hour..hour + 5000) {
            let micros = micros(nanos);
            // Not every reader of numbers finds the nearest one.
            for read in [micros.next_down(), micros, micros.next_up()] {
                assert_eq!((read * 1000.0) as u64, nanos);
                assert_eq!((read * 1000.0).round() as u64, nanos);
            }
        }
    }
}
