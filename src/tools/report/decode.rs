//! Builds the report of `decode`.

use super::{Axis, Chart, Grid, Page, Scale, Series, Stack, pipeline};
use crate::model::Phase;
use crate::tools::trace::Trace;

/// What is said about a run beside its record.
#[derive(Clone, Debug)]
pub struct About<'a> {
    /// The model.
    pub model: &'a str,
    /// Numbers that sum the run up: value and name.
    pub tiles: &'a [(String, String)],
    /// On what it ran, see [`super::machine::facts`].
    pub facts: &'a [(String, String)],
}

/// Columns that a plot has at most.
const COLUMNS: usize = 200;
/// Colour of what is waited for.
const WAITING: usize = 1;
/// Points of a line.
const BINS: usize = 120;

/// The report.
pub fn page(about: &About<'_>, trace: &Trace) -> Page {
    let mut page = Page::new(&format!("Decode of {}", about.model));
    page.tiles(about.tiles);
    if trace.lost > 0 {
        page.text(&format!(
            "The record was full: its last {} entries are missing, and the plots end early.",
            trace.lost
        ));
    }
    page.section("The pipeline");
    page.text(
        "Drawn to scale. Each layer has a colour, for the reads of its experts above as for its computation below: where reads have another \
         colour than the layer that is being computed, the drives are ahead of it. Pale reads were prefetched, before the router had chosen.",
    );
    pipeline::draw(trace, &mut page.body);
    page.section("Tokens");
    let passes = Passes::of(trace);
    page.text(
        "A pass is one token, the prompt, or a token with the drafts that it verifies. Waiting is the time in which nothing could be computed \
         because no expert had come.",
    );
    page.stack(&passes.times());
    page.grid(&passes.misses());
    page.section("Drives");
    page.charts(&[bandwidth(trace)]);
    page.section("Experts");
    page.grid(&usage(trace));
    page.section("Machine");
    page.facts(about.facts);
    page
}

/// What happened in each pass through the layers.
struct Passes {
    labels: Vec<String>,
    /// Milliseconds of computing and of waiting.
    times: Vec<Vec<f64>>,
    /// By layer and pass, hits and misses.
    served: Vec<Vec<(u64, u64)>>,
    /// How many passes a column has.
    joined: usize,
    /// The first one is a prompt, whose time would dwarf that of the others.
    prompt: bool,
}

impl Passes {
    fn of(trace: &Trace) -> Passes {
        let joined = trace.passes.len().div_ceil(COLUMNS).max(1);
        let columns = trace.passes.len().div_ceil(joined);
        let labels = trace.passes.iter().step_by(joined).map(|pass| {
            if pass.tokens > 1 && pass.position == 0 {
                "prompt".to_owned()
            } else {
                pass.position.to_string()
            }
        });
        let mut times = vec![vec![0.0; 2]; columns];
        let mut begins: Vec<u64> = Vec::new();
        for slice in &trace.slices {
            if slice.pass >= begins.len() {
                begins.resize(slice.pass + 1, slice.begin);
            }
            let waits = usize::from(slice.phase == Phase::IoWait);
            if let Some(times) = times.get_mut(slice.pass / joined) {
                times[waits] += (slice.end - slice.begin) as f64 / 1e6 / joined as f64;
            }
        }
        let layers = (trace.demands.iter()).map(|demand| demand.layer as usize + 1);
        let mut served = vec![vec![(0, 0); columns]; layers.max().unwrap_or(0)];
        for demand in &trace.demands {
            let pass = begins.partition_point(|begin| *begin <= demand.at);
            let of_layer = &mut served[demand.layer as usize];
            if let Some((hits, misses)) = of_layer.get_mut(pass.saturating_sub(1) / joined) {
                *hits += u64::from(demand.hits);
                *misses += u64::from(demand.misses);
            }
        }
        Passes {
            labels: labels.collect(),
            times,
            served,
            joined,
            prompt: joined == 1
                && columns > 1
                && trace.passes.first().is_some_and(|pass| pass.tokens > 1),
        }
    }

    fn x(&self) -> String {
        match self.joined {
            1 => "position of the pass".to_owned(),
            n => format!("position of the pass, mean of {n}"),
        }
    }

    fn times(&self) -> Stack {
        Stack {
            title: if self.prompt {
                "Time of a pass, without the prompt".to_owned()
            } else {
                "Time of a pass".to_owned()
            },
            x: self.x(),
            y: "milliseconds".to_owned(),
            parts: vec![
                (0, "computing".to_owned()),
                (WAITING, "waiting for reads".to_owned()),
            ],
            columns: (self.labels.iter().cloned())
                .zip(self.times.iter().cloned())
                .skip(usize::from(self.prompt))
                .collect(),
        }
    }

    fn misses(&self) -> Grid {
        let share = |(hits, misses): &(u64, u64)| match hits + misses {
            0 => None,
            all => Some(*misses as f64 / all as f64),
        };
        // Dense layers have no experts.
        let sparse = || {
            let layers = self.served.iter().enumerate();
            layers.filter(|(_, served)| served.iter().any(|(hits, misses)| hits + misses > 0))
        };
        Grid {
            title: "Experts that were not in memory, by layer and pass".to_owned(),
            row: "layer".to_owned(),
            column: self.x(),
            rows: sparse().map(|(layer, _)| layer.to_string()).collect(),
            columns: self.labels.clone(),
            cells: sparse()
                .map(|(_, served)| served.iter().map(share).collect())
                .collect(),
            colour: WAITING,
            ends: ("all in memory".to_owned(), "all read".to_owned()),
        }
    }
}

/// Bytes that each source brought over time: a chunk's are spread evenly over its time at the drive.
fn bandwidth(trace: &Trace) -> Chart {
    let end = trace.chunks.iter().map(|chunk| chunk.end).max();
    let end = end
        .unwrap_or(0)
        .max(trace.slices.last().map_or(1, |s| s.end));
    let width = (end as f64 / BINS as f64).max(1.0);
    let mut bytes = vec![vec![0.0; BINS]; trace.sources.len()];
    for chunk in &trace.chunks {
        let Some(bytes) = bytes.get_mut(chunk.source) else {
            continue;
        };
        let (begin, end) = (chunk.begin as f64 / width, chunk.end as f64 / width);
        let long = (end - begin).max(f64::MIN_POSITIVE);
        let bins = bytes.iter_mut().enumerate().skip(begin as usize);
        for (bin, bytes) in bins.take_while(|(bin, _)| *bin as f64 <= end) {
            let part = (end.min(bin as f64 + 1.0) - begin.max(bin as f64)).max(0.0);
            *bytes += chunk.bytes as f64 * part / long;
        }
    }
    let used = bytes
        .iter()
        .enumerate()
        .filter(|(_, b)| b.iter().any(|b| *b > 0.0));
    let series = used.map(|(source, bytes)| Series {
        name: trace.source(source),
        points: (bytes.iter().enumerate())
            .map(|(bin, bytes)| {
                let seconds = width / 1e9;
                (
                    (bin as f64 + 0.5) * seconds,
                    bytes / seconds / f64::from(1 << 20),
                )
            })
            .collect(),
    });
    Chart {
        title: "Bandwidth of each source".to_owned(),
        x: Axis::new("seconds", Scale::Linear),
        y: Axis::new("MiB/s", Scale::Linear),
        series: series.collect(),
    }
}

/// How often each expert was used.
fn usage(trace: &Trace) -> Grid {
    let sparse = || {
        let layers = trace.uses.iter().enumerate();
        layers.filter(|(_, uses)| uses.iter().any(|uses| *uses > 0))
    };
    let experts = trace.uses.iter().map(Vec::len).max().unwrap_or(0);
    let most = trace.uses.iter().flatten().copied().max().unwrap_or(0);
    Grid {
        title: "Uses of each expert".to_owned(),
        row: "layer".to_owned(),
        column: "expert".to_owned(),
        rows: sparse().map(|(layer, _)| layer.to_string()).collect(),
        columns: (0..experts).map(|expert| expert.to_string()).collect(),
        cells: sparse()
            .map(|(_, uses)| {
                let share = |uses: &u32| Some(f64::from(*uses) / f64::from(most.max(1)));
                uses.iter().map(share).collect()
            })
            .collect(),
        colour: 2,
        ends: ("never".to_owned(), format!("{most} times")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colour_means_one_thing() {
        let style = super::super::STYLE;
        for class in [".p-experts", ".p-attention"] {
            let (_, rule) = style
                .split_once(&format!("{class} {{ fill: var(--s"))
                .unwrap();
            let colour: usize = rule[..1].parse().unwrap();
            assert!(colour != WAITING && !pipeline::COLOURS.contains(&colour));
            let mark = format!("i{class} {{ background: var(--s{colour})");
            assert!(style.contains(&mark), "{mark}");
        }
    }
}
