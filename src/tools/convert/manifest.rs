//! Saves the plan of a conversion and the identities of its sources in the output directory, before the first shard
//! is begun.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use colibri_ring::{EngineKind, File};
use serde::{Deserialize, Serialize};

use super::header::header_of;
use super::plan::{self, Notes, Shard, Span};
use super::{ConvertError, Options, Recipe, Summary, shard_path};
use crate::arch::Architecture;
use crate::shards::{Shards, data_sample, write_whole};
use crate::weight;

/// Name of the file; hidden, and not that of a shard.
pub const NAME: &str = ".convert.json";

/// Of what is written here. Another one is refused.
const VERSION: u32 = 2;

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Index of its directory.
    pub dir: usize,
    /// Its name there.
    pub name: PathBuf,
    /// Which file it was then.
    pub identity: Identity,
}

/// What tells a file from another one of the same name: models of one architecture have shards of the same sizes and headers.
/// (The number of the device is no part of it: it may be another one after a restart.)
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Size in bytes.
    pub size: u64,
    /// CRC-32 of its header, the length field included.
    header: u32,
    /// CRC-32 of blocks all over its data.
    data: u32,
    /// When it was written: seconds and nanoseconds.
    mtime: (i64, i64),
    inode: u64,
}

impl Identity {
    /// Of an open shard.
    ///
    /// # Errors
    /// A failing read.
    pub fn of(file: &File) -> Result<Identity, ConvertError> {
        let opened = file.buffered_fd().try_clone_to_owned();
        let meta = opened.and_then(|fd| fs::File::from(fd).metadata());
        let meta = meta.map_err(|source| ConvertError::Io {
            what: "look at",
            path: file.path().to_path_buf(),
            source,
        })?;
        Ok(Identity {
            size: file.size(),
            header: header_crc(file.path())?,
            data: data_sample(file)?,
            mtime: (meta.mtime(), meta.mtime_nsec()),
            inode: meta.ino(),
        })
    }
}

/// The plan of a conversion and its sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    recipe: Recipe,
    shard_size: u64,
    dirs: usize,
    notes: Notes,
    /// The files of the checkpoint.
    pub sources: Vec<SourceFile>,
    /// The output.
    pub shards: Vec<Shard>,
}

impl Manifest {
    /// Plans a conversion from the index of the checkpoint.
    ///
    /// # Errors
    /// A checkpoint that is incomplete or does not fit its config, and formats that could not be read back.
    pub fn make(options: &Options) -> Result<Manifest, ConvertError> {
        let arch = Architecture::load(&options.sources[0])?;
        let shards = Shards::open_partial(&options.sources, &[], EngineKind::Auto)?;
        let found = weight::findings(&shards, &arch)?;
        let lacks = found.lacks();
        if !lacks.is_empty() {
            return Err(ConvertError::NotWhole(lacks));
        }
        let (mut outputs, notes) = plan::plan(&shards, &arch, &options.recipe, options.shard_size)?;
        let synthetic = (0..shards.files().len()).any(|file| shards.is_synthetic(file));
        for output in &mut outputs {
            output.synthetic = synthetic;
        }
        let source = |(i, file): (usize, &std::sync::Arc<colibri_ring::File>)| {
            Ok::<_, ConvertError>(SourceFile {
                dir: shards.dir_of(i),
                name: file.path().file_name().unwrap_or_default().into(),
                identity: Identity::of(file)?,
            })
        };
        Ok(Manifest {
            version: VERSION,
            recipe: options.recipe,
            shard_size: options.shard_size,
            dirs: options.sources.len(),
            notes,
            sources: (shards.files().iter().enumerate())
                .map(source)
                .collect::<Result<_, _>>()?,
            shards: outputs,
        })
    }

    /// The notes in `out`; `None` if there are none.
    ///
    /// # Errors
    /// When they cannot be read or understood.
    pub fn read(out: &Path) -> Result<Option<Manifest>, ConvertError> {
        let path = out.join(NAME);
        let bad = |reason: String| ConvertError::Manifest {
            path: path.clone(),
            reason,
        };
        if fs::metadata(&path).is_ok_and(|meta| !meta.is_file()) {
            return Err(bad("no regular file".into()));
        }
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(bad(e.to_string())),
        };
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|e| bad(format!("no notes of a conversion: {e}")))?;
        if manifest.version != VERSION {
            return Err(bad(format!("version {} is not known", manifest.version)));
        }
        if !manifest.is_consistent() {
            return Err(bad("no notes of a conversion".into()));
        }
        Ok(Some(manifest))
    }

    /// Whether all references are valid. An edited manifest must not make the program panic or write outside
    /// of its directory.
    fn is_consistent(&self) -> bool {
        let plain = |name: &Path| {
            name.file_name() == Some(name.as_os_str())
                && name.extension() == Some("safetensors".as_ref())
        };
        let inside = |span: &Span| {
            let end = span.offset.checked_add(span.bytes);
            let size = self
                .sources
                .get(span.file)
                .map(|source| source.identity.size);
            end.is_some() && end <= size
        };
        let sources = |file: &SourceFile| file.dir < self.dirs && plain(&file.name);
        let items = |shard: &Shard| {
            plain(Path::new(&shard.name))
                && !shard.items.is_empty()
                && shard
                    .items
                    .iter()
                    .all(|item| item.spans().all(|span| inside(&span)) && item.fits())
        };
        let mut names = HashSet::new();
        let mut files = HashSet::new();
        let mut tensors = HashSet::new();
        let all_items = || self.shards.iter().flat_map(|shard| &shard.items);
        self.sources.iter().all(sources)
            && self.shards.iter().all(items)
            && !self.shards.is_empty()
            && (self.sources.iter()).all(|file| files.insert((file.dir, &file.name)))
            && self.shards.iter().all(|shard| names.insert(&shard.name))
            && all_items()
                .flat_map(plan::Item::outputs)
                .all(|output| tensors.insert(&output.name))
            && self.total_bytes().is_some()
    }

    /// Bytes of all tensors on both sides; `None` when they are more than can be counted, headers of the shards included.
    fn total_bytes(&self) -> Option<u64> {
        let mut total = 0u64;
        for item in self.shards.iter().flat_map(|shard| &shard.items) {
            for output in item.outputs() {
                total = total.checked_add(output.planned()?.bytes()?)?;
            }
            for span in item.spans() {
                total = total.checked_add(span.bytes)?;
            }
        }
        (total <= i64::MAX as u64).then_some(total)
    }

    /// Itself, if it is about the same as `options`.
    ///
    /// # Errors
    /// [`ConvertError::OtherOptions`] with the first that differs.
    pub fn check(self, options: &Options) -> Result<Manifest, ConvertError> {
        let name = |packing: Option<crate::quant::encode::Packing>| {
            packing.map_or("keep".to_owned(), |packing| packing.to_string())
        };
        let (was, is) = (&self.recipe, &options.recipe);
        let pairs = [
            ("--experts", name(was.experts), name(is.experts)),
            ("--dense", name(was.dense), name(is.dense)),
            ("--embed", name(was.embed), name(is.embed)),
            ("--mtp", name(was.mtp), name(is.mtp)),
            (
                "--shard-size",
                self.shard_size.to_string(),
                options.shard_size.to_string(),
            ),
            (
                "directories",
                self.dirs.to_string(),
                options.sources.len().to_string(),
            ),
        ];
        match pairs.into_iter().find(|(_, before, now)| before != now) {
            Some((key, before, now)) => Err(ConvertError::OtherOptions {
                out: options.out.clone(),
                key,
                before,
                now,
            }),
            None => Ok(self),
        }
    }

    /// Writes the notes, whole or not at all.
    ///
    /// # Errors
    /// A failing file system.
    pub fn write(&self, out: &Path) -> Result<(), ConvertError> {
        let path = out.join(NAME);
        let text = serde_json::to_vec(self).map_err(|e| ConvertError::Manifest {
            path: path.clone(),
            reason: e.to_string(),
        })?;
        Ok(write_whole(&path, &text)?)
    }

    /// Which shards are finished: a file has its final name only then.
    ///
    /// # Errors
    /// A file of such a name that has another size or header than this conversion gives it.
    pub fn finished(&self, out: &Path) -> Result<Vec<bool>, ConvertError> {
        let finished = |shard: &Shard| {
            let path = shard_path(out, &shard.name);
            let found = match fs::symlink_metadata(&path) {
                Ok(found) => found,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(source) => {
                    return Err(ConvertError::Io {
                        what: "look at",
                        path,
                        source,
                    });
                }
            };
            let (header, data) = header_of(out, shard)?;
            let same = found.is_file()
                && found.len() == header.len() as u64 + data
                && starts_with(&path, &header);
            same.then_some(true).ok_or(ConvertError::Foreign { path })
        };
        self.shards.iter().map(finished).collect()
    }

    /// The last shard that needs each source file; `None` for a file that no shard needs.
    pub fn last_use(&self) -> Vec<Option<usize>> {
        let mut last = vec![None; self.sources.len()];
        for (i, shard) in self.shards.iter().enumerate() {
            for span in shard.items.iter().flat_map(plan::Item::spans) {
                last[span.file] = Some(i);
            }
        }
        last
    }

    /// Sizes of the shards, headers included.
    ///
    /// # Errors
    /// Sizes that no file can have.
    pub fn sizes(&self, out: &Path) -> Result<Vec<u64>, ConvertError> {
        let size =
            |shard: &Shard| header_of(out, shard).map(|(header, data)| header.len() as u64 + data);
        self.shards.iter().map(size).collect()
    }

    /// Numbers about it.
    ///
    /// # Errors
    /// Sizes that no file can have.
    pub fn summary(&self, finished: &[bool]) -> Result<Summary, ConvertError> {
        let mut summary = Summary {
            shards: self.shards.len(),
            finished_before: finished.iter().filter(|f| **f).count(),
            bytes_out: self.sizes(Path::new(""))?.iter().sum(),
            requantised: self.notes.requantised,
            unknown: self.notes.unknown,
            ..Summary::default()
        };
        for (shard, finished) in self.shards.iter().zip(finished) {
            for item in &shard.items {
                let format = item.format.map(|format| format.to_string());
                let format = format.unwrap_or_else(|| item.weights.dtype.clone());
                summary.formats.tensor(format, item.bytes());
                let bytes: u64 = item.spans().map(|span| span.bytes).sum();
                summary.bytes_in += bytes;
                summary.bytes_to_read += if *finished { 0 } else { bytes };
            }
        }
        Ok(summary)
    }

    /// Hugging Face's list of which tensor is in which shard. Until all of them are finished it makes readers say that the
    /// model is incomplete.
    pub fn list(&self) -> serde_json::Value {
        let entries = self.shards.iter().flat_map(|shard| {
            let outputs = shard.items.iter().flat_map(plan::Item::outputs);
            outputs.map(|output| (output.name.clone(), shard.name.clone().into()))
        });
        let map: serde_json::Map<String, serde_json::Value> = entries.collect();
        serde_json::json!({"metadata": {}, "weight_map": map})
    }
}

/// CRC-32 of the header of a shard.
///
/// # Errors
/// When it cannot be read.
pub fn header_crc(path: &Path) -> Result<u32, ConvertError> {
    let crc = || {
        let mut file = fs::File::open(path)?;
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&length);
        let mut rest = file.take(u64::from_le_bytes(length));
        let mut piece = vec![0; 64 << 10];
        loop {
            match rest.read(&mut piece)? {
                0 => return Ok(hasher.finalize()),
                n => hasher.update(&piece[..n]),
            }
        }
    };
    crc().map_err(|source| ConvertError::Io {
        what: "read",
        path: path.to_path_buf(),
        source,
    })
}

fn starts_with(path: &Path, header: &[u8]) -> bool {
    let read = || {
        let mut found = vec![0; header.len()];
        fs::File::open(path)?.read_exact(&mut found)?;
        Ok::<_, io::Error>(found)
    };
    read().is_ok_and(|found| found == header)
}
