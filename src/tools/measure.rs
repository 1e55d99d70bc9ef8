//! Measures bandwidth: reads for some time through the engine that decoding uses, and counts.

use std::time::{Duration, Instant};

use colibri_ring::{
    Class, Engine, EngineError, Event, Files, Layout, Options, Priority, SlabId, Stats,
};
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

/// How to load the drives.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Device, windows, chunks.
    pub engine: Options,
    /// Layouts requested at once: more than the windows hold, so that no drive waits.
    pub slabs: usize,
    /// Size of the largest layout in bytes.
    pub slab_bytes: u64,
    /// Reads before counting begins, so that reads in flight at its beginning offset those in flight at its end.
    pub warm_up: Duration,
    /// Counted time.
    pub time: Duration,
    /// How often `watch` is called; each time costs a copy of the statistics, which would be a tenth of what a fast drive's reads
    /// cost if it were done all the time.
    pub watch_every: Duration,
}

/// Reads in the counted time.
#[derive(Clone, Debug)]
pub struct Measured {
    /// "uring" or "pread".
    pub device: &'static str,
    /// Counted time.
    pub elapsed: Duration,
    /// Processor time of the whole process in it.
    pub cpu: Duration,
    /// Bytes by source.
    pub bytes: Vec<u64>,
    /// Finished reads.
    pub reads: u64,
    /// Time of each read from submission to completion, in microseconds.
    pub latency_us: Histogram<u64>,
}

impl Measured {
    /// Bytes of all sources.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// MiB a second of all sources together.
    pub fn mib_per_s(&self) -> f64 {
        mib_per_s(self.total(), self.elapsed)
    }
}

/// MiB a second; 0 for no time.
pub fn mib_per_s(bytes: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        bytes as f64 / f64::from(1 << 20) / seconds
    } else {
        0.0
    }
}

/// Processor time of this process so far, all threads.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.try_into().unwrap_or(0),
        time.tv_nsec.try_into().unwrap_or(0),
    )
}

/// Reads the layouts that `next` returns, over and over. `watch` is called now and then with the time so far, warm-up included, and
/// the bytes of each source.
///
/// # Errors
/// When the engine does not run, or a read fails on every copy.
pub fn read(
    files: &Files,
    load: Load,
    mut next: impl FnMut() -> Layout,
    mut watch: impl FnMut(Duration, &[u64]),
) -> Result<Measured, EngineError> {
    let class = Class {
        bytes: load.slab_bytes as usize,
        count: load.slabs,
    };
    let mut engine = Engine::on_caller(files, &[class], load.engine)?;
    // At depth 1 the time for warming up would not reach all of it.
    engine.populate();
    for slab in 0..engine.slabs() {
        engine.read(SlabId(slab as u32), Priority::Demand, next());
    }
    let start = Instant::now();
    engine.flush();
    let mut begin: Option<(Instant, Duration, Stats)> = None;
    let mut tick = start;
    loop {
        // All events, and then one flush: one entry into the kernel.
        let mut event = Some(engine.wait()?);
        while let Some(happened) = event {
            match happened {
                Event::Full(slab) => {
                    engine.release(slab);
                    engine.read(slab, Priority::Demand, next());
                }
                Event::Failed(_, error) => return Err(error.into()),
                Event::Part(..) | Event::Dropped(_) => {}
            }
            event = engine.poll()?;
        }
        engine.flush();
        let now = Instant::now();
        let due = match &begin {
            None => now >= start + load.warm_up,
            Some((at, ..)) => now >= *at + load.time,
        };
        if !due && now.duration_since(tick) < load.watch_every {
            continue;
        }
        tick = now;
        let counting = begin.as_ref().is_some_and(|(at, ..)| now < *at + load.time);
        let stats = stats(&mut engine)?;
        let bytes: Vec<u64> = stats.sources.iter().map(|source| source.bytes).collect();
        watch(now - start, &bytes);
        match begin.take() {
            None if now >= start + load.warm_up => begin = Some((now, cpu_time(), stats)),
            None => {}
            Some(kept) if counting => begin = Some(kept),
            Some((at, cpu, before)) => {
                return Ok(measured(
                    &engine,
                    now - at,
                    cpu_time() - cpu,
                    &before,
                    &stats,
                ));
            }
        }
    }
}

fn stats(engine: &mut Engine) -> Result<Stats, EngineError> {
    match engine.stats() {
        Some(stats) => Ok(stats),
        // Its reason comes with the next event.
        None => loop {
            engine.wait()?;
        },
    }
}

fn measured(
    engine: &Engine,
    elapsed: Duration,
    cpu: Duration,
    before: &Stats,
    after: &Stats,
) -> Measured {
    let mut latency_us = after.latency_us.clone();
    // What was recorded before is part of what is recorded after.
    let _ = latency_us.subtract(&before.latency_us);
    let sources = after.sources.iter().zip(&before.sources);
    Measured {
        device: engine.device(),
        elapsed,
        cpu,
        bytes: sources.clone().map(|(a, b)| a.bytes - b.bytes).collect(),
        reads: sources.map(|(a, b)| a.reads - b.reads).sum(),
        latency_us,
    }
}

/// Generates random numbers that need not be secure: splitmix64.
#[derive(Clone, Copy, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// Any number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n
    }
}

/// How many slabs keep `drives` drives busy that each have the window of `options`: what their windows hold, and as much again
/// as the others may read while one stalls.
pub fn slabs(options: &Options, drives: usize, slab_bytes: u64) -> usize {
    const STALL: u64 = 192 << 20;
    let bytes = (options.window.bytes.saturating_mul(drives as u64)).saturating_add(STALL);
    let slabs = bytes.div_ceil(slab_bytes.max(1)).min(4096) as usize;
    slabs.max(2 * drives + 2)
}
