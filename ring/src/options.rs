//! How an engine reads.

use crate::device::EngineKind;
use crate::drive::Window;

/// How an engine reads.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The device.
    pub kind: EngineKind,
    /// How much each drive has at once.
    pub window: Window,
    /// Within which bounds, in bytes, a better window is sought for each drive while it works; `None`: it stays as it is.
    pub search: Option<(u64, u64)>,
    /// Reads that are not demanded may fill a `1 / ahead_share` of a drive's window, see [`Options::for_reads_of`].
    pub ahead_share: u64,
    /// Spans are read in pieces of about this many bytes.
    pub chunk_bytes: u64,
    /// Reads of about this many bytes may be waited for at once, which saves entries into the kernel; 0: every read that ends
    /// is noticed at once.
    pub batch_bytes: u64,
    /// How many chunks are recorded, see [`Engine::take_record`](crate::engine::Engine::take_record); 0: none.
    pub record: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            kind: EngineKind::Auto,
            window: Window::default(),
            search: None,
            ahead_share: 8,
            chunk_bytes: 512 << 10,
            batch_bytes: 4 << 20,
            record: 0,
        }
    }
}

impl Options {
    /// What decoding uses: a few chunks up to a few milliseconds of a fast drive.
    pub const SEARCH: (u64, u64) = (4 << 20, 16 << 20);

    /// With reads ahead as large as suits demands of `bytes` bytes. A demand that comes up waits until what is at the drive has been read, so
    /// reads ahead get little: an eighth of the window, two chunks of the usual size, the second of which hides the latency of the first. Where a
    /// demand is larger than half a window, a quarter of its bytes, and at most half of the window: a drive that ends all that it has at
    /// once idles in between, the more often the less it is given.
    pub fn for_reads_of(self, bytes: u64) -> Options {
        let share = self.window.bytes.saturating_mul(4) / bytes.max(1);
        Options {
            ahead_share: share.clamp(2, 8),
            ..self
        }
    }

    /// Bytes of reads ahead that a drive may have at once, about.
    pub fn ahead_bytes(&self) -> u64 {
        self.window.bytes / self.ahead_share.max(1)
    }

    /// How many reads a drive can have at once.
    pub(crate) fn depth(&self) -> usize {
        let by_bytes = self.window.bytes.div_ceil(self.chunk_bytes.max(1));
        (self.window.reads).min(usize::try_from(by_bytes).unwrap_or(usize::MAX))
    }
}
