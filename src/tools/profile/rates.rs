//! What a drive's bandwidth means for a model: tokens a second.

use bytesize::ByteSize;

/// What a model asks of the drive for each token.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// Bytes of all experts that a token uses.
    pub token_bytes: u64,
    /// Routed experts of the model.
    pub experts: u64,
    /// How many of them the memory that decoding would plan with keeps; or why it has no plan.
    pub kept: Result<u64, String>,
}

impl Demand {
    /// Tokens a second with no expert in memory, at a speed in bytes a second.
    pub fn cold(&self, speed: f64) -> f64 {
        speed / self.token_bytes.max(1) as f64
    }

    /// The part of a token's experts that are found in memory when routing is even: real routing prefers some, and finds more.
    pub fn even_hits(&self) -> Option<f64> {
        let kept = *self.kept.as_ref().ok()?;
        Some((kept as f64 / self.experts.max(1) as f64).min(1.0))
    }

    /// Tokens a second with what memory keeps and even routing, at a speed in bytes a second. `None` where the drive is not
    /// needed, or nothing is known.
    pub fn cached(&self, speed: f64) -> Option<f64> {
        let missed = 1.0 - self.even_hits()?;
        (missed > 0.0).then(|| self.cold(speed) / missed)
    }

    /// What somebody who wants to buy the drive has to know.
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

    fn demand(kept: u64) -> Demand {
        Demand {
            token_bytes: 100 << 20,
            experts: 400,
            kept: Ok(kept),
        }
    }

    #[test]
    fn what_memory_keeps_need_not_be_read() {
        let speed = f64::from(1000 << 20);
        assert_eq!(demand(0).cold(speed), 10.0);
        assert_eq!(demand(0).cached(speed), Some(10.0));
        assert_eq!(demand(300).cached(speed), Some(40.0));
        assert_eq!(demand(400).cached(speed), None);
        assert!(demand(400).sentences(speed)[1].contains("not needed"));
        assert!(demand(300).sentences(speed)[1].contains("40.00 tokens"));
    }

    #[test]
    fn a_model_that_does_not_fit_is_said_to() {
        let demand = Demand {
            kept: Err("too large".into()),
            ..demand(0)
        };
        assert!(demand.sentences(1e9)[1].ends_with("too large."));
    }
}
