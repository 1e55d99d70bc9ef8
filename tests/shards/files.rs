//! Makes valid and invalid shards.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// `"name":{"dtype":..,"shape":..,"data_offsets":[start,end]}`
pub fn entry(name: &str, dtype: &str, shape: &[u64], start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
}

/// A temporary directory for one test.
pub struct Dir(TempDir);

impl Dir {
    pub fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The argument of `Shards::open`.
    pub fn dirs(&self) -> [PathBuf; 1] {
        [self.path().to_path_buf()]
    }

    /// A shard of these entries, and these bytes of data.
    pub fn shard(&self, file: &str, entries: &[String], data: &[u8]) {
        self.shard_of(file, format!("{{{}}}", entries.join(",")), data);
    }

    /// A shard with this text as its header.
    pub fn shard_of(&self, file: &str, header: impl AsRef<[u8]>, data: &[u8]) {
        let header = header.as_ref();
        self.shard_claiming(file, header.len() as u64, header, data);
    }

    /// A shard that claims a header of `len` bytes.
    pub fn shard_claiming(&self, file: &str, len: u64, header: &[u8], data: &[u8]) {
        let bytes = [&len.to_le_bytes()[..], header, data].concat();
        fs::write(self.path().join(file), bytes).unwrap();
    }

    /// A shard of one tensor `t` of `len` bytes, all holes but the given (position, bytes).
    pub fn sparse(&self, file: &str, dtype: &str, elements: u64, len: u64, parts: &[(u64, &[u8])]) {
        let entry = entry("t", dtype, &[elements], 0, len);
        self.shard(file, std::slice::from_ref(&entry), &[]);
        let file = fs::File::options()
            .write(true)
            .open(self.path().join(file))
            .unwrap();
        let start = 8 + entry.len() as u64 + 2;
        file.set_len(start + len).unwrap();
        for (at, bytes) in parts {
            file.write_all_at(bytes, start + at).unwrap();
        }
    }
}
