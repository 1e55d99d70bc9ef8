//! Holds the options of an engine.

use crate::device::EngineKind;
use crate::drive::Window;

/// Options of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The device of every copy that names none ([`Replica::device`](crate::Replica::device)).
    pub kind: EngineKind,
    /// How much each drive gets at once.
    pub window: Window,
    /// Bounds in bytes, both included, within which a better window is searched for each drive while it works; `None` keeps the
    /// window.
    pub search: Option<(u64, u64)>,
    /// Prefetches and preloads may fill a `1 / prefetch_share` of a drive's window, see [`Options::for_reads_of`].
    pub prefetch_share: u64,
    /// Spans are read in pieces of about this many bytes.
    pub chunk_bytes: u64,
    /// A wait may last until about this many bytes have been read, which saves system calls; 0 returns at every completion.
    pub batch_bytes: u64,
    /// How many chunks are recorded for [`Engine::take_record`](crate::Engine::take_record).
    pub record: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            kind: EngineKind::Auto,
            window: Window::default(),
            search: None,
            prefetch_share: 8,
            chunk_bytes: 512 << 10,
            batch_bytes: 4 << 20,
            record: 0,
        }
    }
}

impl Options {
    /// Bounds for [`Options::search`]: from a few chunks to a few milliseconds of a fast drive.
    pub const SEARCH: (u64, u64) = (4 << 20, 16 << 20);

    /// Sets the share of prefetches for demands of `bytes` bytes. A demand waits until the drive has read what it has already, so
    /// prefetches get little: an eighth of the window, two chunks of the usual size, of which the second hides the latency of
    /// the first. They get a quarter of the bytes of a demand that is larger than half a window, and at most half of the window:
    /// drives that complete their whole queue in one burst idle in between, the more often the less they get.
    pub fn for_reads_of(self, bytes: u64) -> Options {
        let share = self.window.bytes.saturating_mul(4) / bytes.max(1);
        Options {
            prefetch_share: share.clamp(2, 8),
            ..self
        }
    }

    /// About how many bytes of prefetches a drive may have at once.
    pub fn prefetch_bytes(&self) -> u64 {
        self.window.bytes / self.prefetch_share.max(1)
    }

    /// The most reads that a drive has at once.
    pub(crate) fn depth(&self) -> usize {
        let by_bytes = self.window.bytes.div_ceil(self.chunk_bytes.max(1));
        (self.window.reads).min(usize::try_from(by_bytes).unwrap_or(usize::MAX))
    }
}
