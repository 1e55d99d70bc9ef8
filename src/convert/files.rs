//! The directories: what is read, what may be removed, and where the output goes.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use colibri_ring::file::File;

use super::manifest::{self, Manifest, SourceFile, header_crc};
use super::{ConvertError, Options};
use crate::shards::write_whole;

/// Larger than any tokenizer by far, in bytes.
const MAX_SMALL_FILE: u64 = 256 << 20;

/// The files of the checkpoint, as far as they are still there.
#[derive(Debug)]
pub struct Sources {
    paths: Vec<PathBuf>,
    files: Vec<Option<File>>,
}

impl Sources {
    /// Opens the files that unfinished shards need and makes sure that they are those of the plan.
    ///
    /// # Errors
    /// One that is missing or has changed; with `delete_source`, one that is a link or has several names.
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
            if !needed {
                files.push(None);
                continue;
            }
            let opened = File::open(path)?;
            if opened.size() != file.size || header_crc(path)? != file.header {
                return Err(ConvertError::SourceChanged { path: path.clone() });
            }
            files.push(Some(opened));
        }
        Ok(Sources { paths, files })
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
    /// When the system refuses.
    pub fn remove(&mut self, file: usize) -> Result<bool, ConvertError> {
        // The space is free only when nobody has the file open.
        self.files[file] = None;
        let path = self.path(file);
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
}

impl OutDir {
    /// Looks whether it may be the output.
    ///
    /// # Errors
    /// When it is one of the sources, under whatever spelling.
    pub fn look(options: &Options) -> Result<OutDir, ConvertError> {
        let path = options.out.clone();
        if let Ok(out) = path.canonicalize() {
            let same = |source: &PathBuf| source.canonicalize().is_ok_and(|source| source == out);
            if options.sources.iter().any(same) {
                return Err(ConvertError::SameDirectory { out: path });
            }
        }
        Ok(OutDir { path })
    }

    /// # Errors
    /// When there is anything in it.
    pub fn must_be_new(&self) -> Result<(), ConvertError> {
        match fs::read_dir(&self.path) {
            Ok(mut entries) => match entries.next() {
                // What was left of a beginning that was interrupted before anything was in place.
                Some(Ok(entry)) if entry.file_name() != ".convert.json.part" => {
                    Err(ConvertError::NotEmpty {
                        out: self.path.clone(),
                    })
                }
                _ => Ok(()),
            },
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
    /// A failing file system.
    pub fn begin(&self, options: &Options, manifest: &Manifest) -> Result<(), ConvertError> {
        let io = |what, path: &Path| {
            let path = path.to_path_buf();
            move |source| ConvertError::Io { what, path, source }
        };
        fs::create_dir_all(&self.path).map_err(io("make", &self.path))?;
        if !self.path.join(manifest::NAME).exists() {
            manifest.write(&self.path)?;
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
