//! Gives fuzz targets a model directory whose files they replace with the fuzzer's bytes.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A directory that starts as a copy of a fixture.
#[derive(Debug)]
pub struct ModelDir(TempDir);

impl ModelDir {
    /// A copy of `tests/fixtures/NAME`.
    ///
    /// # Panics
    /// If the fixture cannot be copied.
    pub fn copy_of(fixture: &str) -> ModelDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let from = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fixtures")
            .join(fixture);
        for entry in fs::read_dir(from).expect("the fixture") {
            let entry = entry.expect("an entry of the fixture");
            fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("to copy a file");
        }
        ModelDir(dir)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Replaces a file.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.file(name), bytes).expect("to write a file");
    }

    /// Reads a file.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).expect("to read a file")
    }
}

/// A directory of which the fuzzer writes one of two files; the other is the fixture's.
#[derive(Debug)]
pub struct OneOfTwo {
    dir: ModelDir,
    files: [(&'static str, Vec<u8>); 2],
}

impl OneOfTwo {
    /// A copy of `tests/fixtures/FIXTURE` and the names of the two files.
    pub fn new(fixture: &str, names: [&'static str; 2]) -> OneOfTwo {
        let dir = ModelDir::copy_of(fixture);
        let files = names.map(|name| (name, dir.read(name)));
        OneOfTwo { dir, files }
    }

    /// Writes both files. The first byte of `data` chooses: the first file is the rest if it is even, else the second.
    pub fn write(&self, data: &[u8]) -> Option<&ModelDir> {
        let (which, data) = data.split_first()?;
        for (i, (name, own)) in self.files.iter().enumerate() {
            let chosen = usize::from(which % 2) == i;
            self.dir.write(name, if chosen { data } else { own });
        }
        Some(&self.dir)
    }
}

/// Applies the edits that `data` describes: an offset (2 bytes), a length (1), the bytes. So few bytes of input reach every byte of a
/// file that is much larger.
pub fn edit(file: &mut Vec<u8>, mut data: &[u8]) {
    while let Some((head, rest)) = data.split_first_chunk::<3>() {
        let at = usize::from(u16::from_le_bytes([head[0], head[1]])) % (file.len() + 1);
        let len = usize::from(head[2] % 16).min(rest.len());
        let (bytes, rest) = rest.split_at(len);
        match head[2] / 16 {
            // Cuts the file.
            0 => file.truncate(at),
            // Inserts.
            1 => drop(file.splice(at..at, bytes.iter().copied())),
            // Replaces.
            _ => {
                let end = (at + len).min(file.len());
                file[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
        data = rest;
    }
}
