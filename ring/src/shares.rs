//! Divides reads between sources in the ratio that the user has set, whatever their speeds.

/// How far a source may be ahead of its share, in bytes, while those that are behind have no capacity: enough that the end of one
/// read does not leave the other drives idle, and negligible over a second.
const SLACK: u64 = 16 << 20;

/// Bytes requested from each source, kept in the ratio of the weights.
#[derive(Debug)]
pub(crate) struct WeightedShares {
    weights: Vec<u32>,
    /// Bytes requested from each source, less those that it did not deliver.
    requested: Vec<u64>,
}

impl WeightedShares {
    pub(crate) fn new(weights: Vec<u32>) -> WeightedShares {
        WeightedShares {
            requested: vec![0; weights.len()],
            weights,
        }
    }

    pub(crate) fn weight(&self, source: usize) -> u32 {
        self.weights.get(source).copied().unwrap_or(0)
    }

    /// Bytes requested from it, divided by its weight: the source with the least is next.
    fn turn(&self, source: usize) -> f64 {
        self.requested[source] as f64 / f64::from(self.weights[source])
    }

    /// Which of `copies`, as (copy, source, whether its drive has capacity), to read; `None` while the sources that are next have
    /// no capacity. All sources have a weight.
    pub(crate) fn choose(&self, copies: impl Iterator<Item = (u8, usize, bool)>) -> Option<u8> {
        let mut first = f64::INFINITY;
        let mut best: Option<(f64, u8, usize)> = None;
        for (copy, source, capacity) in copies {
            let turn = self.turn(source);
            first = first.min(turn);
            if capacity && best.is_none_or(|(least, ..)| turn < least) {
                best = Some((turn, copy, source));
            }
        }
        let (turn, copy, source) = best?;
        let ahead = (turn - first) * f64::from(self.weights[source]);
        (ahead <= SLACK as f64).then_some(copy)
    }

    /// Counts `bytes` that are requested from a source.
    pub(crate) fn request(&mut self, source: usize, bytes: u64) {
        if let Some(requested) = self.requested.get_mut(source) {
            *requested += bytes;
        }
    }

    /// Takes `bytes` off again that a source did not deliver.
    pub(crate) fn release(&mut self, source: usize, bytes: u64) {
        if let Some(requested) = self.requested.get_mut(source) {
            *requested = requested.saturating_sub(bytes);
        }
    }
}
