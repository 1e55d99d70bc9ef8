//! Formats numbers of bytes.

use bytesize::ByteSize;

/// Formats bytes with a binary unit: `20.3 MiB`.
pub fn human(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}
