//! Writes random models in the container format: true layout and shapes, weights without meaning.
//!
//! `tensors` lists what the container holds, `fill` makes the values. Values depend on the seed
//! and the tensor's name alone, so that threads and shard sizes change no byte of a tensor.

mod fill;
mod tensors;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::arch::{Architecture, ConfigError, Part, Prediction};
use crate::pool::Pool;
use crate::shards::{
    Metadata, SYNTHETIC, ShardWriter, WriteError, free_space, shard_bytes, write_whole,
};

pub use tensors::Coding;

use tensors::{Content, Item};

/// What is to be made.
#[derive(Clone, Debug)]
pub struct Spec {
    /// `config.json`, as by [`Preset::config_json`](crate::arch::Preset::config_json).
    pub config: Value,
    /// Whether there is a layer for drafts.
    pub drafts: bool,
    /// How routed experts are stored; `None` for the format that the family is published in, or int4-g64.
    pub experts: Option<Coding>,
    /// How the large resident matrices are stored.
    pub dense: Coding,
    /// Whether experts and large resident matrices are holes, which read as zeros and take no room.
    pub sparse: bool,
    /// Seed of every value.
    pub seed: u64,
    /// Bytes after which a shard is closed; an expert is never cut in two.
    pub shard_bytes: u64,
}

/// What was made, or would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Number of shards.
    pub shards: usize,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all shards.
    pub bytes: u64,
    /// Bytes of them that are no holes.
    pub written: u64,
}

/// Why no model was made. Nothing is left of it then.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The shape is no config that could be run.
    #[error("the shape is not possible: {0}")]
    Shape(#[from] ConfigError),
    /// Sizes that cannot be counted.
    #[error("tensor {0} is too large")]
    TooLarge(String),
    /// A layer that no model of the family has.
    #[error("models of type {0} have no layer for multi-token prediction")]
    Drafts(&'static str),
    /// Experts in another format than the family's only one.
    #[error("experts of type {0} are written as mxfp4: leave out --experts-format")]
    ExpertsFormat(&'static str),
    /// A matrix whose format could not be told from its sizes.
    #[error(
        "tensor {name} would have {cols} columns, and as {format} could not be told from another format; take wider ones, or bf16"
    )]
    Unreadable {
        /// The tensor.
        name: String,
        /// Its columns.
        cols: usize,
        /// The format asked for.
        format: &'static str,
    },
    /// There is something in the directory already.
    #[error("{} is not an empty directory", .0.display())]
    Occupied(PathBuf),
    /// The disk is too full.
    #[error(
        "{} has {free} bytes free, the model takes {needed}; --sparse makes its large matrices holes", dir.display()
    )]
    Space {
        /// The directory.
        dir: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        free: u64,
    },
    /// The directory could not be made or looked at.
    #[error("cannot use {}: {source}", dir.display())]
    Dir {
        /// The directory.
        dir: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A shard could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// It was asked to stop.
    #[error("interrupted")]
    Stopped,
}

/// Whether a directory holds anything but the unfinished shards of a run that was killed, which are written anew.
fn holds_something(dir: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if !(name.starts_with('.') && name.ends_with(".part")) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A model that is ready to be written.
#[derive(Debug)]
pub struct Synth {
    spec: Spec,
    config: String,
    shards: Vec<Vec<Item>>,
    made: Made,
}

impl Synth {
    /// Works out the tensors and their shards.
    ///
    /// # Errors
    /// A shape that no config allows, or whose sizes overflow.
    pub fn new(spec: Spec) -> Result<Synth, SynthError> {
        let path = Path::new("config.json");
        let mut arch = Architecture::from_json(path, &spec.config, None)?;
        if spec.drafts && !arch.names.has(Part::DraftInput) {
            return Err(SynthError::Drafts(arch.model_type));
        }
        if spec.experts.is_some() && arch.experts.in_pairs() {
            return Err(SynthError::ExpertsFormat(arch.model_type));
        }
        // The public container has the layer for drafts without an indexer.
        arch.prediction = (spec.drafts).then_some(Prediction { indexer: false });
        let items = tensors::tensors(&arch, &spec)?;
        let mut synth = Synth {
            config: format!("{:#}\n", spec.config),
            shards: tensors::into_shards(items, spec.shard_bytes),
            made: Made::default(),
            spec,
        };
        let mut made = Made {
            shards: synth.shards.len(),
            ..Made::default()
        };
        for (i, items) in synth.shards.iter().enumerate() {
            let path = synth.shard_path(Path::new(""), i);
            let planned: Vec<_> = items.iter().map(|item| item.planned.clone()).collect();
            let all = shard_bytes(&path, &planned, &synth.metadata())?;
            let holes = items
                .iter()
                .filter(|item| item.content == Content::Hole)
                .map(|item| item.bytes)
                .sum::<u64>();
            made.tensors += items.len();
            made.bytes = made.bytes.saturating_add(all);
            made.written = made.written.saturating_add(all - holes);
        }
        synth.made = made;
        Ok(synth)
    }

    /// What will be written.
    pub fn made(&self) -> Made {
        self.made
    }

    /// Writes the model into `dir`, which must be empty or not exist: shards first, config.json last, so that a directory
    /// with a config is complete. `progress` is called with bytes as they are written; `stop` ends it early.
    ///
    /// # Errors
    /// A directory that holds something, too little space, a failing write, a stop. What was written is removed.
    pub fn write(
        &self,
        dir: &Path,
        pool: &Pool,
        stop: &AtomicBool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), SynthError> {
        let failed = |source| SynthError::Dir {
            dir: dir.to_path_buf(),
            source,
        };
        let existed = dir.exists();
        if existed && holds_something(dir).map_err(failed)? {
            return Err(SynthError::Occupied(dir.to_path_buf()));
        }
        fs::create_dir_all(dir).map_err(failed)?;
        let written = self.write_all(dir, pool, stop, progress);
        if written.is_err() {
            for i in 0..self.shards.len() {
                let _ = fs::remove_file(self.shard_path(dir, i));
            }
            if !existed {
                // Only if empty: files of others stay.
                let _ = fs::remove_dir(dir);
            }
        }
        written
    }

    fn write_all(
        &self,
        dir: &Path,
        pool: &Pool,
        stop: &AtomicBool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), SynthError> {
        let free = free_space(dir).map_err(|source| SynthError::Dir {
            dir: dir.to_path_buf(),
            source,
        })?;
        if free < self.made.written {
            return Err(SynthError::Space {
                dir: dir.to_path_buf(),
                needed: self.made.written,
                free,
            });
        }
        let first_error = Mutex::new(None);
        let failed = AtomicBool::new(false);
        let next = AtomicUsize::new(0);
        // A loop over threads, not over shards: a thread takes the next shard when it has finished one.
        pool.run(pool.threads(), &|_| {
            let mut buffer = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= self.shards.len() || failed.load(Ordering::Relaxed) {
                    return;
                }
                let stopped = || stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
                if let Err(error) = self.write_shard(dir, i, &mut buffer, &stopped, progress) {
                    failed.store(true, Ordering::Relaxed);
                    let mut first = first_error.lock().unwrap_or_else(PoisonError::into_inner);
                    first.get_or_insert(error);
                    return;
                }
            }
        });
        match first_error
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
        {
            Some(error) => Err(error),
            None => Ok(write_whole(
                &dir.join("config.json"),
                self.config.as_bytes(),
            )?),
        }
    }

    fn write_shard(
        &self,
        dir: &Path,
        i: usize,
        buffer: &mut Vec<u8>,
        stopped: &dyn Fn() -> bool,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), SynthError> {
        /// Bytes that are made at a time: they are still in the second-level cache when the kernel copies them.
        const PIECE: u64 = 512 << 10;
        let items = &self.shards[i];
        let planned: Vec<_> = items.iter().map(|item| item.planned.clone()).collect();
        let path = self.shard_path(dir, i);
        let mut writer = ShardWriter::create(&path, &planned, &self.metadata())?;
        for item in items {
            if stopped() {
                return Err(SynthError::Stopped);
            }
            if item.content == Content::Hole {
                writer.skip(item.bytes)?;
                continue;
            }
            let source = fill::Source::new(self.spec.seed, &item.planned.name, item.content);
            for at in (0..item.bytes).step_by(PIECE as usize) {
                if stopped() {
                    return Err(SynthError::Stopped);
                }
                buffer.resize(PIECE.min(item.bytes - at) as usize, 0);
                source.fill(at, buffer);
                writer.write(buffer)?;
                progress(buffer.len() as u64);
            }
        }
        Ok(writer.finish()?)
    }

    /// Marks shards with holes, which are refused in any other model.
    fn metadata(&self) -> Metadata {
        let mark = (SYNTHETIC.to_owned(), "sparse".to_owned());
        self.spec.sparse.then_some(mark).into_iter().collect()
    }

    fn shard_path(&self, dir: &Path, i: usize) -> PathBuf {
        let of = self.shards.len();
        dir.join(format!("model-{:05}-of-{of:05}.safetensors", i + 1))
    }
}
