//! Writes one shard: the header, then the data of its tensors in order, then the rename to its final name.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use colibri_ring::headers::PREFIX;
use rustix::fs::{Advice, FallocateFlags};
use rustix::io::Errno;
use serde_json::{Map, Value, json};

use super::error::Shown;
use super::part::{open_part, part_of};
use super::{Dtype, MAX_HEADER, Metadata};
use crate::atomic_file::{directory, sync_directory};

/// The data section starts at a multiple of this, so that direct reads of the first tensor need no wider range.
const DATA_ALIGN: u64 = 4096;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<u64>,
}

impl Planned {
    /// Bytes of its data; `None` if the shape overflows or does not fill whole bytes.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
        self.dtype.bytes(elements)
    }
}

/// Why a shard could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// A tensor is named twice.
    #[error("{}: tensor {} is to be written twice", file.display(), Shown(name))]
    Twice {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        name: String,
    },
    /// A tensor, the shard or the header is larger than the format allows.
    #[error("{}: {what} is too large", file.display())]
    TooLarge {
        /// The shard.
        file: PathBuf,
        /// The thing that is too large.
        what: String,
    },
    /// Another process is writing the same shard.
    #[error("{}: another process is writing it", file.display())]
    Busy {
        /// The temporary file.
        file: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot write {}: {source}", file.display())]
    Io {
        /// The temporary file, or the directory.
        file: PathBuf,
        /// Its error; a full disk is `StorageFull`.
        source: io::Error,
    },
    /// The data given is not as long as the header says.
    #[error("{}: {given} bytes of data were given, the header says {expected}", file.display())]
    Length {
        /// The shard.
        file: PathBuf,
        /// Bytes given, those of the refused call included.
        given: u64,
        /// Bytes of all tensors.
        expected: u64,
    },
}

/// Writes a shard under a temporary name in its directory; [`ShardWriter::finish`] gives it the final name.
///
/// Until then a file under the final name stays as it was, and dropping the writer removes the temporary file. The next writer of the
/// shard overwrites the temporary file of a killed process.
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    /// `.NAME.part`, which no reader takes as a shard.
    part: PathBuf,
    file: File,
    data_start: u64,
    data: u64,
    /// Bytes of the data section so far.
    at: u64,
    /// Bytes written by [`ShardWriter::write_at`].
    placed: AtomicU64,
    finished: bool,
}

impl ShardWriter {
    /// Starts the shard `path` and writes its header: the tensors in the given order, without gaps between their data, and
    /// `__metadata__` unless it is empty. The header is padded so that data starts at a multiple of 4096 bytes.
    ///
    /// # Errors
    /// A name given twice, sizes that overflow, another writer of the same shard, or a failing file system.
    pub fn create(
        path: &Path,
        tensors: &[Planned],
        metadata: &Metadata,
    ) -> Result<ShardWriter, WriteError> {
        let (header, data) = shard_header(path, tensors, metadata)?;
        let part = part_of(path);
        let io = |source| WriteError::Io {
            file: part.clone(),
            source,
        };
        let file = open_part(&part).map_err(io)?;
        // The lock keeps two processes from writing one file. If another process finished between open and lock, the descriptor is that
        // of the finished shard, which must not be truncated.
        let ours = file.try_lock().is_ok()
            && matches!((file.metadata(), fs::symlink_metadata(&part)), (Ok(a), Ok(b)) if a.ino() == b.ino());
        if !ours {
            return Err(WriteError::Busy { file: part });
        }
        let writer = ShardWriter {
            path: path.to_path_buf(),
            part: part.clone(),
            file,
            data_start: header.len() as u64,
            data,
            at: 0,
            placed: AtomicU64::new(0),
            finished: false,
        };
        writer.file.set_len(0).map_err(io)?;
        writer.file.write_all_at(&header, 0).map_err(io)?;
        Ok(writer)
    }

    /// Bytes of the data section so far.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Appends data: tensor after tensor, in pieces of any length.
    ///
    /// # Errors
    /// More data than the header says, or a failing write.
    pub fn write(&mut self, data: &[u8]) -> Result<(), WriteError> {
        let end = self.end_of(data.len() as u64)?;
        let offset = self.data_start + self.at;
        self.file
            .write_all_at(data, offset)
            .map_err(|e| self.io(e))?;
        self.at = end;
        Ok(())
    }

    /// Leaves `bytes` of data as a hole, which reads as zeros and takes no disk space.
    ///
    /// # Errors
    /// More data than the header says.
    pub fn skip(&mut self, bytes: u64) -> Result<(), WriteError> {
        self.at = self.end_of(bytes)?;
        Ok(())
    }

    /// Allocates the disk space for all data, so that a full disk fails before any work, and the file has few extents. A file system
    /// without preallocation is not an error.
    ///
    /// # Errors
    /// A full disk, or a failing one.
    pub fn reserve(&self) -> Result<(), WriteError> {
        let all = self.data_start + self.data;
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, all) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(e) => Err(self.io(e.into())),
        }
    }

    /// Writes data at byte `at` of the data section. Threads may write different ranges at the same time. [`ShardWriter::finish`] requires
    /// that every byte was written once, by this or by [`ShardWriter::write`].
    ///
    /// # Errors
    /// A range outside the data section, or a failing write.
    pub fn write_at(&self, data: &[u8], at: u64) -> Result<(), WriteError> {
        let len = data.len() as u64;
        match at.checked_add(len) {
            Some(end) if end <= self.data => {}
            end => return Err(self.length(end.unwrap_or(u64::MAX))),
        }
        let offset = self.data_start + at;
        self.file
            .write_all_at(data, offset)
            .map_err(|e| self.io(e))?;
        self.placed.fetch_add(len, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the shard durable and gives it its final name, replacing a file of that name.
    ///
    /// # Errors
    /// Less data than the header says, or a failing file system. The temporary file is removed.
    pub fn finish(mut self) -> Result<(), WriteError> {
        let given = self.at + self.placed.load(Ordering::Relaxed);
        if given != self.data {
            return Err(self.length(given));
        }
        let all = self.data_start + self.data;
        let durable = self.file.set_len(all).and_then(|()| self.file.sync_all());
        durable.map_err(|e| self.io(e))?;
        // The shard is not read soon, so it leaves the page cache to other files.
        let _ = rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed);
        fs::rename(&self.part, &self.path).map_err(|e| self.io(e))?;
        self.finished = true;
        sync_directory(&self.path).map_err(|source| WriteError::Io {
            file: directory(&self.path).to_path_buf(),
            source,
        })
    }

    fn end_of(&self, more: u64) -> Result<u64, WriteError> {
        match self.at.checked_add(more) {
            Some(end) if end <= self.data => Ok(end),
            end => Err(self.length(end.unwrap_or(u64::MAX))),
        }
    }

    fn length(&self, given: u64) -> WriteError {
        WriteError::Length {
            file: self.path.clone(),
            given,
            expected: self.data,
        }
    }

    fn io(&self, source: io::Error) -> WriteError {
        WriteError::Io {
            file: self.part.clone(),
            source,
        }
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_file(&self.part);
        }
    }
}

/// Size in bytes of the file of these tensors, header included.
///
/// # Errors
/// As [`ShardWriter::create`].
pub fn shard_bytes(
    path: &Path,
    tensors: &[Planned],
    metadata: &Metadata,
) -> Result<u64, WriteError> {
    let (header, data) = shard_header(path, tensors, metadata)?;
    Ok(header.len() as u64 + data)
}

/// Free bytes of the file system that holds `dir`, for an unprivileged process.
///
/// # Errors
/// Those of statvfs.
pub fn free_space(dir: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Writes a small file (a config, a list) atomically: temporary file, fsync, rename.
///
/// # Errors
/// A failing file system.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let part = part_of(path);
    let io = |source| WriteError::Io {
        file: path.to_path_buf(),
        source,
    };
    let file = open_part(&part).map_err(|source| WriteError::Io {
        file: part.clone(),
        source,
    })?;
    let written = (|| {
        file.set_len(0)?;
        file.write_all_at(bytes, 0)?;
        file.sync_all()?;
        fs::rename(&part, path)?;
        sync_directory(path)
    })();
    written.map_err(|source| {
        let _ = fs::remove_file(&part);
        io(source)
    })
}

/// The header with which [`ShardWriter::create`] begins the file (its length, JSON text and padding), and the number of bytes of data after
/// it.
///
/// # Errors
/// As [`ShardWriter::create`].
pub fn shard_header(
    path: &Path,
    tensors: &[Planned],
    metadata: &Metadata,
) -> Result<(Vec<u8>, u64), WriteError> {
    let too_large = |what: String| WriteError::TooLarge {
        file: path.to_path_buf(),
        what,
    };
    let mut entries = Map::new();
    if !metadata.is_empty() {
        entries.insert("__metadata__".into(), json!(metadata));
    }
    let (mut at, mut names) = (0u64, HashSet::new());
    for tensor in tensors {
        if tensor.name == "__metadata__" || !names.insert(&tensor.name) {
            return Err(WriteError::Twice {
                file: path.to_path_buf(),
                name: tensor.name.clone(),
            });
        }
        let end = tensor.bytes().and_then(|bytes| at.checked_add(bytes));
        let end = end.ok_or_else(|| too_large(format!("tensor {}", Shown(&tensor.name))))?;
        let entry: Value = json!({
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "data_offsets": [at, end],
        });
        entries.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut text = serde_json::to_vec(&entries).map_err(|e| too_large(e.to_string()))?;
    let start = (PREFIX + text.len() as u64).next_multiple_of(DATA_ALIGN);
    if start - PREFIX > MAX_HEADER || at > i64::MAX as u64 - start {
        return Err(too_large("the shard".into()));
    }
    text.resize((start - PREFIX) as usize, b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    Ok((bytes, at))
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn planned(name: &str, dtype: Dtype, shape: &[u64]) -> Planned {
        Planned {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        }
    }

    fn files(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = names.map(|e| name(e).into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_safetensors_crate_reads_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let metadata = Metadata::from([("colibri.fmt".into(), "{\"b\":\"int8\"}".into())]);
        // Not in the order of names, one of them empty, one a hole.
        let tensors = [
            planned("z", Dtype::F32, &[2]),
            planned("hole", Dtype::U8, &[5000]),
            planned("none", Dtype::F16, &[0, 3]),
            planned("b", Dtype::U8, &[3]),
        ];
        let mut writer = ShardWriter::create(&path, &tensors, &metadata).unwrap();
        let z = [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat();
        writer.write(&z[..3]).unwrap();
        writer.write(&z[3..]).unwrap();
        writer.skip(5000).unwrap();
        writer.write(&[7, 8, 9]).unwrap();
        assert_eq!(writer.position(), 5011);
        assert_eq!(files(dir.path()), [".a.safetensors.part"]);
        writer.finish().unwrap();
        assert_eq!(files(dir.path()), ["a.safetensors"]);

        let bytes = fs::read(&path).unwrap();
        assert_eq!(
            shard_bytes(&path, &tensors, &metadata).unwrap(),
            bytes.len() as u64
        );
        let (n, header) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!((n as u64 + PREFIX) % DATA_ALIGN, 0);
        assert_eq!(
            header.metadata().as_ref().unwrap()["colibri.fmt"],
            "{\"b\":\"int8\"}"
        );
        let read = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor("z").unwrap().data(), z);
        assert_eq!(read.tensor("b").unwrap().data(), [7, 8, 9]);
        assert!(read.tensor("hole").unwrap().data().iter().all(|b| *b == 0));
        assert_eq!(read.tensor("none").unwrap().shape(), [0, 3]);
    }

    #[test]
    fn an_unfinished_shard_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        fs::write(&path, "old").unwrap();
        // The next writer overwrites what a killed process left.
        fs::write(part_of(&path), vec![1; 10_000]).unwrap();
        let tensors = [planned("a", Dtype::U8, &[4])];
        let none = Metadata::new();
        let mut writer = ShardWriter::create(&path, &tensors, &none).unwrap();
        let busy = ShardWriter::create(&path, &tensors, &none).unwrap_err();
        assert!(matches!(busy, WriteError::Busy { .. }), "{busy}");
        writer.write(&[1, 2, 3]).unwrap();
        for more in [2, u64::MAX] {
            let error = writer.skip(more).unwrap_err();
            assert!(matches!(error, WriteError::Length { .. }), "{error}");
        }
        let error = writer.finish().unwrap_err().to_string();
        assert!(
            error.contains("3 bytes") && error.contains("says 4"),
            "{error}"
        );
        assert_eq!(files(dir.path()), ["a.safetensors"]);
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn impossible_headers_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let none = Metadata::new();
        let a = planned("a", Dtype::U8, &[4]);
        let cases = [
            (
                vec![a.clone(), a.clone()],
                "tensor a is to be written twice",
            ),
            (
                vec![planned("b", Dtype::F32, &[1 << 40, 1 << 40])],
                "tensor b is too large",
            ),
            (vec![planned("c", Dtype::F4, &[3])], "tensor c is too large"),
            (
                ["d", "e", "f", "g", "h"]
                    .map(|name| planned(name, Dtype::U8, &[u64::MAX / 8]))
                    .to_vec(),
                "the shard is too large",
            ),
        ];
        for (tensors, message) in cases {
            let error = ShardWriter::create(&path, &tensors, &none).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
        assert!(files(dir.path()).is_empty());
    }

    #[test]
    fn small_files_are_whole_or_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        write_whole(&path, b"{}").unwrap();
        write_whole(&path, b"{1}").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"{1}");
        assert_eq!(files(dir.path()), ["config.json"]);
        assert!(write_whole(&dir.path().join("no/such"), b"").is_err());
        assert!(free_space(dir.path()).unwrap() > 0);
    }
}
