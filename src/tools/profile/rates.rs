//! Converts a drive's bandwidth into a model's tokens per second.

use bytesize::ByteSize;

/// What a model reads for each token, and how much of it memory holds.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertTraffic {
    /// Bytes of all experts that a token uses.
    pub token_bytes: u64,
    /// Routed experts of the model.
    pub experts: u64,
    /// How many of them fit into the memory plan; or why there is no plan.
    pub kept: Result<u64, String>,
}

impl ExpertTraffic {
    /// Tokens per second with no expert in memory, at a speed in bytes per second.
    pub fn cold(&self, speed: f64) -> f64 {
        speed / self.token_bytes.max(1) as f64
    }

    /// The hit rate when all experts are used equally often. Real routing prefers some, and hits more.
    pub fn even_hits(&self) -> Option<f64> {
        let kept = *self.kept.as_ref().ok()?;
        Some((kept as f64 / self.experts.max(1) as f64).min(1.0))
    }

    /// Tokens per second with the planned memory and even routing, at a speed in bytes per second. `None` when the drive is not
    /// needed, or there is no plan.
    pub fn cached(&self, speed: f64) -> Option<f64> {
        let missed = 1.0 - self.even_hits()?;
        (missed > 0.0).then(|| self.cold(speed) / missed)
    }

    /// The verdict in sentences.
    pub fn sentences(&self, speed: f64) -> Vec<String> {
        let mib = speed / f64::from(1 << 20);
        let cold = self.cold(speed);
        let mut sentences = vec![format!(
            "At {mib:.0} MiB/s the experts of a token ({}), none of them in memory, take {:.3} s: \
             at most {cold:.2} tokens a second.",
            ByteSize::b(self.token_bytes).display().iec(),
            1.0 / cold.max(f64::MIN_POSITIVE),
        )];
        sentences.push(match (&self.kept, self.cached(speed)) {
            (Ok(kept), Some(rate)) => format!(
                "The memory that is available now keeps {kept} of {} experts: at most {rate:.2} tokens a second when all \
                 are used equally often, more when some are preferred.",
                self.experts
            ),
            (Ok(_), None) => format!(
                "The memory that is available now keeps all {} experts: once they are read, this drive is not needed.",
                self.experts
            ),
            (Err(reason), _) => format!("With the memory that is available now it does not run: {reason}."),
        });
        sentences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(kept: u64) -> ExpertTraffic {
        ExpertTraffic {
            token_bytes: 100 << 20,
            experts: 400,
            kept: Ok(kept),
        }
    }

    #[test]
    fn cached_experts_are_not_read() {
        let speed = f64::from(1000 << 20);
        assert_eq!(traffic(0).cold(speed), 10.0);
        assert_eq!(traffic(0).cached(speed), Some(10.0));
        assert_eq!(traffic(300).cached(speed), Some(40.0));
        assert_eq!(traffic(400).cached(speed), None);
        assert!(traffic(400).sentences(speed)[1].contains("not needed"));
        assert!(traffic(300).sentences(speed)[1].contains("40.00 tokens"));
    }

    #[test]
    fn the_reason_for_no_plan_is_printed() {
        let traffic = ExpertTraffic {
            kept: Err("too large".into()),
            ..traffic(0)
        };
        assert!(traffic.sentences(1e9)[1].ends_with("too large."));
    }
}
