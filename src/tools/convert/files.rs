//! Opens source files, removes them once they are converted, and locks the output directory.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use colibri_ring::File;

use super::manifest::{self, Identity, Manifest, SourceFile};
use super::{ConvertError, Options};
use crate::shards::{part_of, write_whole};

/// Larger than any tokenizer by far, in bytes.
const MAX_SMALL_FILE: u64 = 256 << 20;

/// The files of the checkpoint that have not been removed.
#[derive(Debug)]
pub struct Sources {
    /// The notes, for messages.
    notes: PathBuf,
    paths: Vec<PathBuf>,
    files: Vec<Option<File>>,
}

impl Sources {
    /// Opens the files that unfinished shards need and makes sure that all that are there are those of the plan.
    ///
    /// # Errors
    /// One that is needed and missing, or has changed; with `delete_source`, one that is a link or has several names.
    pub fn open(
        options: &Options,
        manifest: &Manifest,
        finished: &[bool],
    ) -> Result<Sources, ConvertError> {
        let mut needed = vec![false; manifest.sources.len()];
        for (shard, finished) in manifest.shards.iter().zip(finished) {
            let spans = shard.items.iter().flat_map(|item| item.spans());
            spans.for_each(|span| needed[span.file] |= !finished);
        }
        let path = |file: &SourceFile| options.sources[file.dir].join(&file.name);
        let paths: Vec<PathBuf> = manifest.sources.iter().map(path).collect();
        let mut files = Vec::new();
        for ((path, file), needed) in paths.iter().zip(&manifest.sources).zip(needed) {
            if options.delete_source {
                removable(path)?;
            }
            let gone = || {
                let found = path.symlink_metadata();
                found.is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
            };
            if !needed && gone() {
                files.push(None);
                continue;
            }
            let opened = File::open(path)?;
            // The size first: what was cut off cannot be sampled.
            if opened.size() != file.identity.size || Identity::of(&opened)? != file.identity {
                return Err(ConvertError::SourceChanged {
                    path: path.clone(),
                    notes: options.out.join(manifest::NAME),
                });
            }
            files.push(needed.then_some(opened));
        }
        let notes = options.out.join(manifest::NAME);
        Ok(Sources {
            notes,
            paths,
            files,
        })
    }

    /// A file that an unfinished shard needs.
    pub fn file(&self, file: usize) -> Option<&File> {
        self.files.get(file)?.as_ref()
    }

    /// The path of a file.
    pub fn path(&self, file: usize) -> &Path {
        &self.paths[file]
    }

    /// Removes a file; false if it is not there any more.
    ///
    /// # Errors
    /// When it is not the one of the plan any more, or the system refuses.
    pub fn remove(&mut self, file: usize, manifest: &Manifest) -> Result<bool, ConvertError> {
        // The file system frees the space only when the file is closed.
        self.files[file] = None;
        let path = self.path(file);
        if fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            return Ok(false);
        }
        // Hours may have passed since it was looked at.
        removable(path)?;
        let found = File::open(path)?;
        let noted = &manifest.sources[file].identity;
        if found.size() != noted.size || Identity::of(&found)? != *noted {
            return Err(ConvertError::SourceChanged {
                path: path.to_path_buf(),
                notes: self.notes.clone(),
            });
        }
        drop(found);
        match fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(ConvertError::Io {
                what: "remove",
                path: path.to_path_buf(),
                source,
            }),
        }
    }
}

/// Refuses files whose data would stay when they are removed.
fn removable(path: &Path) -> Result<(), ConvertError> {
    let linked = |what| ConvertError::Linked {
        path: path.to_path_buf(),
        what,
    };
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => Err(linked("is a link")),
        Ok(found) if found.nlink() > 1 => Err(linked("has several names (hard links)")),
        // Gone already, or the open that follows says what is wrong.
        _ => Ok(()),
    }
}

/// The directory of the container.
#[derive(Debug)]
pub struct OutDir {
    path: PathBuf,
    /// Locked while something is written.
    lock: Option<fs::File>,
}

impl OutDir {
    /// Looks whether it may be the output.
    ///
    /// # Errors
    /// When it is one of the sources, under whatever spelling.
    pub fn inspect(options: &Options) -> Result<OutDir, ConvertError> {
        let path = options.out.clone();
        if let Ok(out) = path.canonicalize() {
            let same = |source: &PathBuf| source.canonicalize().is_ok_and(|source| source == out);
            if options.sources.iter().any(same) {
                return Err(ConvertError::SameDirectory { out: path });
            }
        }
        Ok(OutDir { path, lock: None })
    }

    /// # Errors
    /// When there is anything in it.
    pub fn must_be_new(&self) -> Result<(), ConvertError> {
        match fs::read_dir(&self.path) {
            Ok(entries) => {
                // What was left of a beginning that was interrupted before anything was in place.
                let part = part_of(&self.path.join(manifest::NAME));
                let left = |entry: &fs::DirEntry| entry.path() == part;
                if entries.flatten().all(|entry| left(&entry)) {
                    return Ok(());
                }
                Err(ConvertError::NotEmpty {
                    out: self.path.clone(),
                })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(ConvertError::Io {
                what: "list",
                path: self.path.clone(),
                source,
            }),
        }
    }

    /// Makes the directory with everything but the shards. The notes come first: with them, what is interrupted can go on.
    ///
    /// # Errors
    /// Another process that writes there, or a failing file system.
    pub fn begin(&mut self, options: &Options, manifest: &Manifest) -> Result<(), ConvertError> {
        let io = |what, path: &Path| {
            let path = path.to_path_buf();
            move |source| ConvertError::Io { what, path, source }
        };
        fs::create_dir_all(&self.path).map_err(io("make", &self.path))?;
        let lock = fs::File::open(&self.path).map_err(io("open", &self.path))?;
        let busy = || ConvertError::Busy {
            out: self.path.clone(),
        };
        // A file system without locks is no reason not to write.
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            return Err(busy());
        }
        self.lock = Some(lock);
        match Manifest::read(&self.path)? {
            Some(found) if found == *manifest => {}
            // Begun by another process since the plan was made.
            Some(_) => return Err(busy()),
            None => {
                self.must_be_new()?;
                manifest.write(&self.path)?;
            }
        }
        let list = self.path.join("model.safetensors.index.json");
        write_whole(&list, manifest.list().to_string().as_bytes())?;
        for dir in &options.sources {
            for entry in fs::read_dir(dir).map_err(io("list", dir))? {
                let name = entry.map_err(io("list", dir))?.file_name();
                let (from, to) = (dir.join(&name), self.path.join(&name));
                let wanted = name.to_str().is_some_and(goes_along) && !to.exists();
                // A tokenizer may be a link.
                let small = |m: fs::Metadata| m.is_file() && m.len() <= MAX_SMALL_FILE;
                if wanted && fs::metadata(&from).is_ok_and(small) {
                    let bytes = fs::read(&from).map_err(io("read", &from))?;
                    write_whole(&to, &bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// Files beside the shards that a container needs.
fn goes_along(name: &str) -> bool {
    const NAMES: [&str; 6] = [
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
    ];
    NAMES.contains(&name) || name.starts_with("tokenizer") || name.starts_with("chat_template")
}
