//! Starts the server as a user does, and reads its metrics.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::binary;

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// Where it listens.
    pub address: String,
    log: Option<JoinHandle<()>>,
}

/// What the server has done since it was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Bytes of experts read.
    pub bytes: f64,
    /// Experts that passes demanded, and those of them that had to be read.
    pub demands: f64,
    /// Of these, experts that had to be read.
    pub misses: f64,
    /// Passes.
    pub passes: f64,
    /// Seconds that passes computed.
    pub compute: f64,
    /// Seconds that passes waited for reads.
    pub wait: f64,
}

impl Counts {
    /// What was done since `before`.
    pub fn since(self, before: Counts) -> Counts {
        Counts {
            bytes: self.bytes - before.bytes,
            demands: self.demands - before.demands,
            misses: self.misses - before.misses,
            passes: self.passes - before.passes,
            compute: self.compute - before.compute,
            wait: self.wait - before.wait,
        }
    }
}

impl Server {
    /// Serves `model` on a free port, with more flags.
    ///
    /// # Errors
    /// When it does not start: what it said.
    pub fn start(model: &Path, flags: &[String]) -> anyhow::Result<Server> {
        let mut child = Command::new(binary::path()?)
            .args(["serve", "--port", "0", "--model"])
            .arg(model)
            .args(flags)
            // Runs that are compared must not learn from one another.
            .env("COLIBRI_NO_USAGE", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start the server")?;
        let stderr = child.stderr.take().context("the server has no stderr")?;
        let mut server = Server {
            child,
            address: String::new(),
            log: None,
        };
        let mut lines = BufReader::new(stderr).lines();
        let mut said = Vec::new();
        for line in lines.by_ref() {
            let line = line.context("the server says nothing")?;
            if let Some(address) = line.strip_prefix("listening on http://") {
                server.address = address.to_owned();
                // Nothing waits for the reader of its log.
                server.log = Some(thread::spawn(move || lines.for_each(drop)));
                return Ok(server);
            }
            said.push(line);
        }
        bail!("the server does not start: {}", said.join("\n"))
    }

    /// Waits until nothing runs, and reads the counters.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn counts(&self) -> anyhow::Result<Counts> {
        loop {
            let text = self.metrics()?;
            let sum = |name: &str| -> anyhow::Result<f64> {
                let mut values = text.lines().filter_map(|line| {
                    let (key, value) = line.rsplit_once(' ')?;
                    (key.split('{').next() == Some(name)).then(|| value.parse::<f64>())
                });
                values.try_fold(0.0, |sum, value| Ok(sum + value.context("a metric")?))
            };
            if sum("colibri_requests_running")? + sum("colibri_requests_waiting")? > 0.0 {
                thread::sleep(Duration::from_millis(5));
                continue;
            }
            let misses = sum("colibri_expert_misses_total")?;
            return Ok(Counts {
                bytes: sum("colibri_read_bytes_total")?,
                demands: sum("colibri_expert_hits_total")? + misses,
                misses,
                passes: sum("colibri_passes_total")?,
                compute: sum("colibri_compute_seconds_total")?,
                wait: sum("colibri_io_wait_seconds_total")?,
            });
        }
    }

    fn metrics(&self) -> anyhow::Result<String> {
        let url = format!("http://{}/metrics", self.address);
        let mut answer = ureq::get(&url).call().context("no metrics")?;
        ensure!(answer.status() == 200, "{url}: {}", answer.status());
        Ok(answer.body_mut().read_to_string()?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(log) = self.log.take() {
            let _ = log.join();
        }
    }
}
