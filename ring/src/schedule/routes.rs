//! Remembers how each copy of a file is read and whether it failed.

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

/// The copies that may be read: those that are not marked in `failed`. A copy that failed an earlier chunk serves only where all
/// others have failed, too.
pub(super) fn usable(copies: &[Route], failed: u32) -> impl Iterator<Item = u8> {
    let untried = move |c: usize| failed & (1 << c) == 0;
    let healthy_left = (0..copies.len()).any(|c| untried(c) && !copies[c].failed);
    (0..copies.len())
        .filter(move |&c| untried(c) && (!copies[c].failed || !healthy_left))
        .map(|c| c as u8)
}
