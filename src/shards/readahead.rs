//! Finds how much the kernel reads ahead on a drive.

use std::fs;

/// The kernel's default, in bytes.
const DEFAULT: u64 = 128 << 10;

/// The longest hint that the kernel follows on the drive `st_dev`, in bytes; the kernel ignores the rest of a longer one. The default where
/// the drive does not tell.
pub(super) fn of_drive(st_dev: u64) -> u64 {
    let (major, minor) = (rustix::fs::major(st_dev), rustix::fs::minor(st_dev));
    let block = format!("/sys/dev/block/{major}:{minor}");
    // A partition has its disk above it; a network or pooled file system only has the third.
    let places = [
        format!("{block}/queue/read_ahead_kb"),
        format!("{block}/../queue/read_ahead_kb"),
        format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"),
    ];
    let kib = places
        .iter()
        .find_map(|place| fs::read_to_string(place).ok()?.trim().parse::<u64>().ok());
    match kib {
        Some(kib) if kib > 0 => kib.saturating_mul(1024),
        _ => DEFAULT,
    }
}
