//! Finds a lab, the fixture and the program for tests whose drives fail.

use std::path::{Path, PathBuf};

use colibri_bench::lab::{Backing, Lab};

/// A lab, or a message why there is none here.
pub fn lab() -> Option<Lab> {
    match Lab::new(Backing::Memory) {
        Ok(lab) => Some(lab),
        Err(e) if e.is_unavailable() => {
            eprintln!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

pub fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/bf16-shared")
}

/// The binary beside this test's: built by `cargo build` or `cargo test` of the workspace.
pub fn colibri() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let path = test.parent()?.parent()?.join("colibri-uring");
    if !path.is_file() {
        eprintln!("skipped: {} is not built", path.display());
        return None;
    }
    Some(path)
}
