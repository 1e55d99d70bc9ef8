//! Remembers how each copy of a file is read and whether it failed.

use std::io;

use crate::replica::{Access, Replica};

/// How a copy is read.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) replica: Replica,
    /// Index of its drive.
    pub(super) drive: usize,
    pub(super) access: Access,
    /// Set after a failure: other copies are preferred from then on.
    pub(super) failed: bool,
}

impl Route {
    /// Whether an O_DIRECT read that the file system refuses may go through the page cache.
    pub(super) fn may_be_buffered(&self) -> bool {
        self.access != Access::DirectOnly
    }

    /// Reads it through the page cache from now on.
    pub(super) fn buffer(&mut self, refused: &io::Error) {
        if self.access.is_direct() {
            self.access = Access::Buffered;
            let path = self.replica.file.path().display();
            tracing::warn!("{path} is read through the page cache: O_DIRECT reads fail: {refused}");
        }
    }
}

/// The copies that may be read: those that are not marked in `failed`. A copy that failed an earlier chunk serves only where all
/// others have failed, too.
pub(super) fn usable(copies: &[Route], failed: u32) -> impl Iterator<Item = u8> {
    let untried = move |c: usize| failed & (1 << c) == 0;
    let healthy_left = (0..copies.len()).any(|c| untried(c) && !copies[c].failed);
    (0..copies.len())
        .filter(move |&c| untried(c) && (!copies[c].failed || !healthy_left))
        .map(|c| c as u8)
}
