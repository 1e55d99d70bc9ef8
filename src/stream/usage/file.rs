//! Reads and writes the usage file of a model. It has a fixed length for a model, and is checked whole before it is used.
//! docs/formats.md has the layout.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::Builder;

use super::{Identity, Usage};
use crate::atomic_file;
use crate::checksum;

/// Name of the file, in the model's first directory.
pub const FILE_NAME: &str = ".coli_usage";

const MAGIC: [u8; 8] = *b"coliuse\n";
const VERSION: u32 = 1;
/// Up to the numbers of the layers.
const HEAD: usize = 48;
/// The checksum.
const TAIL: usize = 4;
/// No model that can be loaded has a longer file.
const MAX_BYTES: u64 = 64 << 20;
/// No count that ages becomes as large.
const MAX_COUNT: f32 = 1e9;

/// Why a usage file is not used.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// It cannot be read.
    #[error("{} cannot be read and is ignored: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// It is a directory, a pipe, or a file of another kind.
    #[error("{} is no history of expert usage; it is ignored and stays as it is", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// A later version of the program wrote it.
    #[error("{} has version {version} of the format, this program knows {VERSION}; it is ignored and stays as it is", file.display())]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its version.
        version: u32,
    },
    /// It belongs to another model.
    #[error("{} is the history of another model ({what} differ); it is ignored and stays as it is: remove it to begin anew", file.display())]
    OtherModel {
        /// The file.
        file: PathBuf,
        /// What is not the same.
        what: &'static str,
    },
    /// It is truncated, or its checksum is wrong.
    #[error("{} is damaged ({what}); it is ignored and will be replaced", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
}

impl UsageError {
    /// Whether the file is useless and may be replaced.
    pub fn replaceable(&self) -> bool {
        matches!(self, UsageError::Damaged { .. })
    }
}

/// Reads the usage of a model; `None` if there is no file.
pub(super) fn read(path: &Path, model: &Identity) -> Result<Option<Usage>, UsageError> {
    let file = path.to_path_buf();
    // Before it is opened: opening a pipe would wait for its other end.
    let length = match fs::metadata(path) {
        Ok(found) if found.is_file() => found.len(),
        Ok(_) => return Err(UsageError::Foreign { file }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(UsageError::Io { file, source }),
    };
    let bytes = || {
        let mut bytes = Vec::new();
        let limit = length.min(MAX_BYTES) + 1;
        File::open(path)?.take(limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = bytes().map_err(|source| UsageError::Io {
        file: file.clone(),
        source,
    })?;
    parse(&bytes, model).map(Some).map_err(|flaw| match flaw {
        Flaw::Foreign => UsageError::Foreign { file },
        Flaw::Newer(version) => UsageError::Newer { file, version },
        Flaw::OtherModel(what) => UsageError::OtherModel { file, what },
        Flaw::Damaged(what) => UsageError::Damaged { file, what },
    })
}

#[derive(Debug, PartialEq, Eq)]
enum Flaw {
    Foreign,
    Newer(u32),
    OtherModel(&'static str),
    Damaged(&'static str),
}

/// The numbers of a file, from its beginning.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Parses the usage of `model`. Nothing is allocated before checksum and model are checked.
fn parse(bytes: &[u8], model: &Identity) -> Result<Usage, Flaw> {
    const TRUNCATED: Flaw = Flaw::Damaged("it is truncated");
    let mut numbers = Numbers(bytes);
    match numbers.take() {
        Some(MAGIC) => {}
        None if MAGIC.starts_with(bytes) => return Err(TRUNCATED),
        _ => return Err(Flaw::Foreign),
    }
    let version = numbers.u32().ok_or(TRUNCATED)?;
    if version > VERSION {
        return Err(Flaw::Newer(version));
    }
    let Some((_, sum)) = bytes
        .split_last_chunk::<TAIL>()
        .filter(|_| bytes.len() >= HEAD + TAIL)
    else {
        return Err(TRUNCATED);
    };
    if !checksum::holds(&bytes[..bytes.len() - TAIL], u32::from_le_bytes(*sum)) {
        return Err(Flaw::Damaged("its checksum is wrong"));
    }
    // Whole from here on: what does not fit is another model's.
    let mut u32 = || numbers.u32().ok_or(TRUNCATED);
    let (layers, experts, top_k) = (u32()?, u32()?, u32()?);
    let mut u64 = || numbers.u64().ok_or(TRUNCATED);
    let (tensors, tensor_bytes, runs) = (u64()?, u64()?, u64()?);
    let same = [
        (u64::from(layers) == model.layers.len() as u64, "layers"),
        (u64::from(experts) == model.experts as u64, "experts"),
        (u64::from(top_k) == model.top_k as u64, "experts of a token"),
        (tensors == model.tensors, "tensors"),
        (tensor_bytes == model.bytes, "bytes"),
    ];
    if let Some((_, what)) = same.iter().find(|(same, _)| !same) {
        return Err(Flaw::OtherModel(what));
    }
    if bytes.len() != length(model) {
        return Err(Flaw::Damaged("its length is wrong"));
    }
    for layer in &model.layers {
        if numbers.u32() != u32::try_from(*layer).ok() {
            return Err(Flaw::OtherModel("layers"));
        }
    }
    let mut usage = Usage::new(model.layers.clone(), model.experts, model.top_k);
    usage.runs = runs;
    for count in &mut usage.counts {
        *count = f32::from_le_bytes(numbers.take().ok_or(TRUNCATED)?);
        if !(0.0..=MAX_COUNT).contains(count) {
            return Err(Flaw::Damaged("it has a count that cannot be"));
        }
    }
    Ok(usage)
}

/// Bytes of the file of a model.
fn length(model: &Identity) -> usize {
    HEAD + 4 * model.layers.len() * (1 + model.experts) + TAIL
}

fn bytes(usage: &Usage, model: &Identity) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length(model));
    bytes.extend(MAGIC);
    for number in [
        VERSION,
        model.layers.len() as u32,
        model.experts as u32,
        model.top_k as u32,
    ] {
        bytes.extend(number.to_le_bytes());
    }
    for number in [model.tensors, model.bytes, usage.runs] {
        bytes.extend(number.to_le_bytes());
    }
    for layer in &model.layers {
        bytes.extend((*layer as u32).to_le_bytes());
    }
    for count in &usage.counts {
        bytes.extend(count.min(MAX_COUNT).to_le_bytes());
    }
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Writes the file atomically.
pub(super) fn write(path: &Path, usage: &Usage, model: &Identity) -> io::Result<()> {
    // Readable like any other new file.
    let mode = fs::Permissions::from_mode(0o666);
    let builder = &mut Builder::new();
    let builder = builder.prefix(FILE_NAME).permissions(mode);
    atomic_file::write(path, builder, &bytes(usage, model))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn model() -> Identity {
        Identity {
            layers: vec![1, 2, 4],
            experts: 5,
            top_k: 2,
            tensors: 77,
            bytes: 1 << 40,
        }
    }

    fn some() -> Usage {
        let mut usage = Usage::new(vec![1, 2, 4], 5, 2);
        usage.record(1, &[0, 4, 4, 2]);
        usage.record(4, &[3, 1]);
        usage.runs = 9;
        usage
    }

    /// The bytes with another u32 at `at` and a checksum that is right.
    fn with(at: usize, number: u32) -> Vec<u8> {
        let mut bytes = bytes(&some(), &model());
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        let end = bytes.len() - TAIL;
        let sum = crc32fast::hash(&bytes[..end]);
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn written_usage_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        assert_eq!(read(&path, &model()).unwrap(), None);
        write(&path, &some(), &model()).unwrap();
        let read = read(&path, &model()).unwrap().unwrap();
        assert_eq!((read.counts, read.runs), (some().counts, 9));
        assert_eq!(fs::metadata(&path).unwrap().len(), length(&model()) as u64);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn each_flaw_has_its_name() {
        let model = model();
        let whole = bytes(&some(), &model);
        let flaw = |bytes: &[u8]| parse(bytes, &model).unwrap_err();
        for end in 0..whole.len() {
            assert!(matches!(flaw(&whole[..end]), Flaw::Damaged(_)), "{end}");
        }
        assert_eq!(
            flaw(&[&whole[..], b"x"].concat()),
            Flaw::Damaged("its checksum is wrong")
        );
        assert_eq!(flaw(b"something else"), Flaw::Foreign);
        assert_eq!(flaw(&with(8, 2)), Flaw::Newer(2));
        for (at, what) in [
            (12, "layers"),
            (16, "experts"),
            (20, "experts of a token"),
            (24, "tensors"),
            (32, "bytes"),
            (HEAD, "layers"),
        ] {
            assert_eq!(flaw(&with(at, u32::MAX)), Flaw::OtherModel(what));
        }
        for count in [f32::NAN, f32::INFINITY, -1.0, 1e30] {
            let bytes = with(HEAD + 12, count.to_bits());
            assert_eq!(flaw(&bytes), Flaw::Damaged("it has a count that cannot be"));
        }
    }

    #[test]
    fn a_directory_of_that_name_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let error = read(dir.path(), &model()).unwrap_err();
        assert!(matches!(error, UsageError::Foreign { .. }) && !error.replaceable());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_panic_or_pass_unless_they_are_what_was_written(
            noise in prop::collection::vec(any::<u8>(), 0..200),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            number: u32, at in 2usize..27, seal: bool,
        ) {
            let _ = parse(&noise, &model());
            let _ = parse(&[&MAGIC[..], &noise].concat(), &model());
            if seal {
                // A right checksum over any numbers.
                if let Ok(usage) = parse(&with(4 * at, number), &model()) {
                    prop_assert!(usage.counts.iter().all(|c| (0.0..=MAX_COUNT).contains(c)));
                }
            }
            let whole = bytes(&some(), &model());
            let mut changed = whole.clone();
            for (index, byte) in changes {
                let at = index.index(changed.len());
                changed[at] = byte;
            }
            prop_assert_eq!(parse(&changed, &model()).is_ok(), changed == whole);
        }
    }
}
