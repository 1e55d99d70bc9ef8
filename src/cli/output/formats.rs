//! Prints the tensors and bytes of each format.

use colibri_uring::weight::Counts;

use super::pluralize::pluralize;
use super::size::human;

/// One line per format, after a title.
pub fn table(formats: &Counts) -> String {
    let title = "by format, scales as a part of what they scale:\n".to_owned();
    let lines = formats.iter().map(|(format, found)| {
        let (tensors, bytes) = (pluralize(found.tensors, "tensor"), human(found.bytes));
        format!("  {format:<14} {tensors:>16}  {bytes}\n")
    });
    std::iter::once(title).chain(lines).collect()
}
