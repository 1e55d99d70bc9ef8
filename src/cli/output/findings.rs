//! Prints warnings and notes about a model. Errors end a command.

use std::io::{self, Write};

use colibri_uring::shards::{Findings, Severity};

/// Prints a line for the warnings and one for the notes.
pub fn print_findings(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    for (severity, name) in [(Severity::Warning, "warning"), (Severity::Note, "note")] {
        let found = findings.only(&[severity]);
        if !found.is_empty() {
            writeln!(out, "{name}: {found}")?;
        }
    }
    Ok(())
}
