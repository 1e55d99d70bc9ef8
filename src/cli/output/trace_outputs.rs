//! Writes the trace and the report of a decode.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use colibri_uring::model::Runner;
use colibri_uring::runtime::Model;
use colibri_uring::tools::report::decode::{About, page};
use colibri_uring::tools::report::machine;
use colibri_uring::tools::trace::Trace;

use super::file::{self, Output};
use super::size::human;
use super::stats::Stats;

/// The files. They are created before the model loads, so that a wrong path fails at once.
#[derive(Debug)]
pub struct TraceOutputs {
    trace: Option<Output>,
    report: Option<Output>,
}

impl TraceOutputs {
    /// Starts the files of `--trace` and `--report`, and that of `--save-routing`. None of them may be the file of `--kv`.
    pub fn create(
        trace: Option<&Path>,
        report: Option<&Path>,
        routing: Option<&Path>,
        kv: Option<&Path>,
    ) -> anyhow::Result<(TraceOutputs, Option<Output>)> {
        let files = [
            ("--trace", trace, "{\"displayTimeUnit\":"),
            ("--report", report, file::HTML),
            ("--save-routing", routing, "{\"routing\":"),
        ];
        let [trace, report, routing] = file::create(files, &[("--kv", kv)])?;
        Ok((TraceOutputs { trace, report }, routing))
    }

    fn wanted(&self) -> bool {
        self.trace.is_some() || self.report.is_some()
    }

    /// Takes the recording from the runner, if a file wants it.
    pub fn take(&self, runner: &mut Runner, model: &Model) -> Option<Trace> {
        self.wanted().then(|| Trace::take(runner, sources(model)))?
    }

    /// Writes both, the second even if the first fails.
    pub fn write(self, trace: Option<Trace>, model: &Model, stats: &Stats) -> anyhow::Result<()> {
        if !self.wanted() {
            return Ok(());
        }
        let trace = trace.context("nothing is recorded: the reads have ended early")?;
        if trace.lost > 0 {
            tracing::warn!(
                "the record was full: its last {} entries are missing",
                trace.lost
            );
        }
        let traced = self
            .trace
            .map_or(Ok(()), |file| file.write(|out| trace.write_chrome(out)));
        let reported = self.report.map_or(Ok(()), |file| {
            let shards = model.shards();
            let about = About {
                model: &machine::listed(shards.dirs()),
                tiles: &tiles(stats),
                facts: &machine::facts(&shards.with_copies()),
            };
            let html = page(&about, &trace).html();
            file.write(|out| out.write_all(html.as_bytes()))
        });
        traced.and(reported)
    }
}

/// Names of the directories that experts are read from.
fn sources(model: &Model) -> Vec<String> {
    let sources = model.sources();
    sources
        .iter()
        .map(|source| source.dir.display().to_string())
        .collect()
}

/// The headline numbers of a run.
fn tiles(stats: &Stats) -> Vec<(String, String)> {
    let engine = &stats.engine;
    let demanded = (engine.expert_hits + engine.expert_misses).max(1);
    let tokens = stats.prefilled_tokens as f64 + stats.tokens_per_second * stats.decode_seconds;
    let per_token = engine.expert_bytes_read as f64 / tokens.max(1.0);
    let busy = stats.prefill_seconds + stats.decode_seconds;
    let rate = engine.expert_bytes_read as f64 / busy.max(f64::MIN_POSITIVE);
    let tile = |value: String, name: &str| (value, name.to_owned());
    vec![
        tile(format!("{:.2}", stats.tokens_per_second), "tokens a second"),
        tile(
            format!(
                "{:.0}%",
                100.0 * engine.expert_hits as f64 / demanded as f64
            ),
            "of experts were in memory",
        ),
        tile(human(per_token as u64), "read for a token"),
        tile(format!("{}/s", human(rate as u64)), "mean bandwidth"),
        tile(
            format!("{:.2} s", engine.io_wait_seconds),
            "waited for reads",
        ),
        tile(format!("{:.2} s", engine.compute_seconds), "computed"),
        tile(human(stats.peak_rss_bytes), "of memory at most"),
    ]
}
