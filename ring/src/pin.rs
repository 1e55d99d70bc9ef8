//! Shares of the drives that somebody has pinned, instead of what their speeds make of it.

/// How far a source may be ahead of its share, in bytes, when those that are behind have no room: enough that the end of one
/// read does not leave the other drives idle, nothing over a second.
const SLACK: u64 = 16 << 20;

/// Bytes asked of each source, kept in a given ratio.
#[derive(Debug)]
pub(crate) struct Pinned {
    weights: Vec<u32>,
    /// Bytes asked of each source, less those that it did not deliver.
    asked: Vec<u64>,
}

impl Pinned {
    pub(crate) fn new(weights: Vec<u32>) -> Pinned {
        Pinned {
            asked: vec![0; weights.len()],
            weights,
        }
    }

    pub(crate) fn weight(&self, source: usize) -> u32 {
        self.weights.get(source).copied().unwrap_or(0)
    }

    /// What it was asked for, in units of its weight: the source where that is the least is the next.
    fn turn(&self, source: usize) -> f64 {
        self.asked[source] as f64 / f64::from(self.weights[source])
    }

    /// Of `copies`, as (copy, source, whether its drive has room), which to read; `None` while those whose turn it is have no
    /// room. All sources have a weight.
    pub(crate) fn choose(&self, copies: impl Iterator<Item = (u8, usize, bool)>) -> Option<u8> {
        let mut first = f64::INFINITY;
        let mut best: Option<(f64, u8, usize)> = None;
        for (copy, source, room) in copies {
            let turn = self.turn(source);
            first = first.min(turn);
            if room && best.is_none_or(|(least, ..)| turn < least) {
                best = Some((turn, copy, source));
            }
        }
        let (turn, copy, source) = best?;
        let ahead = (turn - first) * f64::from(self.weights[source]);
        (ahead <= SLACK as f64).then_some(copy)
    }

    /// `bytes` are asked of a source.
    pub(crate) fn ask(&mut self, source: usize, bytes: u64) {
        if let Some(asked) = self.asked.get_mut(source) {
            *asked += bytes;
        }
    }

    /// They did not come.
    pub(crate) fn take_back(&mut self, source: usize, bytes: u64) {
        if let Some(asked) = self.asked.get_mut(source) {
            *asked = asked.saturating_sub(bytes);
        }
    }
}
