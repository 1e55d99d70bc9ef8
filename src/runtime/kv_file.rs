//! Keeps conversations in files that reopen warm: the token history and the compressed KV cache, turn by turn.
//!
//! Restored rows have the bits that were saved, and the rows of a token depend on the tokens before it alone, so a sequence goes on as
//! if the process had never ended. A turn counts once its records and then a mark have been synced. What was being written when a
//! process was killed is never read, and cut off when the next turn is saved. Everything that counts has a checksum. A file that is
//! damaged, of another model, of other settings or of another kind is refused and not touched. docs/formats.md has the layout.
//!
//! ```no_run
//! # use colibri_uring::runtime::kv_file::{Fingerprint, KvFile};
//! # use colibri_uring::model::{Runner, Sequence, reusable};
//! # fn turn(runner: &mut Runner, sequence: &mut Sequence, print: Fingerprint, prompt: &[u32]) -> Result<(), Box<dyn std::error::Error>> {
//! let mut file = KvFile::open("talk.kv".as_ref(), print)?;
//! file.confirm(runner.weights())?;
//! let kept = reusable(file.ids(), prompt).min(file.rows());
//! file.restore(runner, sequence, kept)?;
//! runner.prefill(sequence, &prompt[kept..])?;
//! file.append(prompt, &sequence.kv(), b"")?;
//! # Ok(())
//! # }
//! ```

use std::fs::File;
use std::io;
use std::iter;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::model::{KvShape, KvSink, KvSource, ModelError, Runner, Sequence, Weights};

mod disk;
mod error;
mod fingerprint;
mod head;
mod log;
mod place;
mod record;
#[cfg(test)]
mod tests;
mod write;

pub use error::KvFileError;
pub use fingerprint::Fingerprint;
pub use place::default_path;

use disk::Blank;
use error::Flaw;
use head::SECTOR;
use log::State;

/// Why a sequence cannot go on from a file.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] KvFileError),
    /// Its rows cannot become those of the sequence.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// An open conversation. While it is open no other process can open it.
#[derive(Debug)]
pub struct KvFile {
    path: PathBuf,
    file: File,
    fingerprint: Fingerprint,
    /// The one in the file; the one above where the next turn begins a new file.
    found: Fingerprint,
    state: State,
    /// The newest mark is not on the disk, and has to be before anything else.
    unmarked: bool,
    /// The next turn begins a new file, which takes the place of this one when it is complete.
    replace: bool,
}

impl KvFile {
    /// Opens the file at `path`, which must be of `fingerprint`, and checks all of it; makes one if there is none. An empty one, as `touch`
    /// and `mktemp` make, is as none: the first turn replaces it.
    ///
    /// # Errors
    /// Any [`KvFileError`] but `NotSaved`. The file is as before.
    pub fn open(path: &Path, fingerprint: Fingerprint) -> Result<KvFile, KvFileError> {
        let file = find(path, &fingerprint)?;
        let begin = beginning(&file).map_err(|flaw| flaw.of(path))?;
        if begin.is_empty() {
            return Ok(KvFile::anew(path, file, fingerprint));
        }
        let read = read_all(&file, &begin, &fingerprint);
        let (found, state, unmarked) = read.map_err(|flaw| flaw.of(path))?;
        Ok(KvFile {
            path: path.to_path_buf(),
            file,
            fingerprint,
            found,
            state,
            unmarked,
            replace: false,
        })
    }

    /// Starts a conversation at `path`. A KV file there is replaced when the first turn is complete.
    ///
    /// # Errors
    /// As [`KvFile::open`], but only a file of another kind is refused.
    pub fn reset(path: &Path, fingerprint: Fingerprint) -> Result<KvFile, KvFileError> {
        let file = find(path, &fingerprint)?;
        let begin = beginning(&file).map_err(|flaw| flaw.of(path))?;
        if !begin.is_empty() && !head::is_ours(&begin) {
            return Err(Flaw::Foreign.of(path));
        }
        Ok(KvFile::anew(path, file, fingerprint))
    }

    /// A conversation without turns, of which the first one replaces `file`.
    fn anew(path: &Path, file: File, fingerprint: Fingerprint) -> KvFile {
        KvFile {
            path: path.to_path_buf(),
            file,
            fingerprint,
            found: fingerprint,
            state: State::empty(),
            unmarked: false,
            replace: true,
        }
    }

    /// Compares the file with the resident weights, too, once they are loaded. Comes before [`KvFile::restore`] and the first turn where the
    /// fingerprint was made without them.
    ///
    /// # Errors
    /// [`KvFileError::Other`] when other weights computed the file, which is as before.
    pub fn confirm(&mut self, weights: &Weights) -> Result<(), KvFileError> {
        let wanted = self.fingerprint.with(weights);
        if wanted.difference(&self.found).is_some() {
            if self.turns() > 0 && !self.replace {
                return Err(Flaw::Other("resident weights").of(&self.path));
            }
            // It has no rows, and a head that was written before the weights were loaded.
            self.replace = true;
        }
        self.fingerprint = wanted;
        Ok(())
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tokens of the conversation. The last ones may have no rows: what follows the last token is never computed.
    pub fn ids(&self) -> &[u32] {
        &self.state.ids
    }

    /// The note of the last turn.
    pub fn note(&self) -> &[u8] {
        &self.state.note
    }

    /// How many tokens have rows in every layer of the model itself.
    pub fn rows(&self) -> usize {
        self.state.rows()
    }

    /// Turns since the file was begun.
    pub fn turns(&self) -> u64 {
        self.state.mark.turns
    }

    /// Bytes that count.
    pub fn bytes(&self) -> u64 {
        self.state.mark.end
    }

    /// What is kept of a token; `None` before the first turn.
    pub fn shape(&self) -> Option<&KvShape> {
        self.state.shape.as_ref()
    }

    /// Continues `sequence` after the first `tokens` tokens of the conversation, at most [`KvFile::rows`]. Before the first turn the
    /// sequence stays as it is.
    ///
    /// # Errors
    /// As [`KvFile::read`] and [`Runner::restore`]. The sequence is then as before.
    pub fn restore(
        &self,
        runner: &mut Runner,
        sequence: &mut Sequence,
        tokens: usize,
    ) -> Result<(), RestoreError> {
        let Some(shape) = self.shape() else {
            return Ok(());
        };
        let ids = self.state.ids[..tokens].to_vec();
        runner.restore(sequence, ids, shape, |rows| {
            self.read(tokens, rows).map_err(RestoreError::from)
        })
    }

    /// Reads the rows of the first `tokens` tokens, at most [`KvFile::rows`], into `sink`.
    ///
    /// # Errors
    /// A failing read, and damage since the file was opened.
    pub fn read(&self, tokens: usize, sink: &mut impl KvSink) -> Result<(), KvFileError> {
        let mut read = || {
            let mut filled = vec![0; self.state.stored().len()];
            let (mut buffer, mut row) = (Vec::new(), Vec::new());
            for extent in &self.state.extents {
                let wanted = match tokens < self.state.ids.len() {
                    true => self.state.common_rows(extent.list, tokens),
                    false => tokens,
                };
                let count = extent.count.min(wanted.saturating_sub(extent.first));
                if count == 0 {
                    continue;
                }
                let offset = extent.offset;
                log::read_record(&self.file, offset, self.state.mark.end, &mut buffer)?;
                let width = self.state.width(extent.list);
                let values = buffer.get(log::ROWS_HEAD..).unwrap_or_default();
                let (values, _) = values.as_chunks::<4>();
                if values.len() < count * width || filled[extent.list] != extent.first {
                    return Err(Flaw::at(offset, "it has changed"));
                }
                row.resize(width, 0.0);
                for values in values.chunks_exact(width).take(count) {
                    let pairs = row.iter_mut().zip(values);
                    pairs.for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
                    sink.push(extent.list, &row);
                }
                filled[extent.list] += count;
            }
            Ok(())
        };
        read().map_err(|flaw: Flaw| flaw.of(&self.path))
    }

    /// Saves a turn, after which the conversation is `history`; `cache` has the rows of its beginning (rows beyond it are not
    /// saved), and `note` is anything to be kept with it. Only what is new is written, unless the file has become mostly waste:
    /// then it is written anew and replaced.
    ///
    /// # Errors
    /// [`KvFileError::NotSaved`] on a full disk or the like, [`KvFileError::Shape`] when the cache is of another shape than those
    /// before. What was saved before stays.
    pub fn append(
        &mut self,
        history: &[u32],
        cache: &impl KvSource,
        note: &[u8],
    ) -> Result<(), KvFileError> {
        let not_saved = |path: &Path| {
            let file = path.to_path_buf();
            move |source| KvFileError::NotSaved { file, source }
        };
        let known = self.state.shape.as_ref();
        if !self.replace && known.is_some_and(|known| !known.agrees_with(&cache.shape())) {
            return Err(KvFileError::Shape {
                file: self.path.clone(),
            });
        }
        if self.replace || self.state.is_wasteful() {
            let path = self.path.clone();
            return self
                .begin_anew(history, cache, note)
                .map_err(not_saved(&path));
        }
        let nothing_new = || {
            let stored = self.state.stored().iter().chain(iter::repeat(&0));
            let mut rows = (0..cache.shape().lists().count()).zip(stored);
            let known = rows.all(|(list, stored)| cache.known(list).min(history.len()) <= *stored);
            known && history == self.state.ids && note == self.state.note
        };
        if self.state.shape.is_some() && nothing_new() {
            return Ok(());
        }
        let path = self.path.clone();
        self.extend(history, cache, note).map_err(not_saved(&path))
    }

    fn extend(&mut self, history: &[u32], cache: &impl KvSource, note: &[u8]) -> io::Result<()> {
        let end = self.state.mark.end;
        if self.unmarked {
            self.mark(&self.state)?;
            self.unmarked = false;
        }
        if self.file.metadata()?.len() > end {
            self.file.set_len(end)?;
        }
        let written = write::turn(&self.file, &self.state, history, cache, note);
        let state = written.inspect_err(|_| {
            // If this fails too, it happens before the next turn.
            let _ = self.file.set_len(end);
        })?;
        let marked = self.file.sync_data().and_then(|()| self.mark(&state));
        // What is on the disk is not known then: what is in memory goes into a new file.
        self.replace |= marked.is_err();
        marked?;
        self.state = state;
        Ok(())
    }

    /// Makes what is in `state` count.
    fn mark(&self, state: &State) -> io::Result<()> {
        let mark = &state.mark;
        self.file.write_all_at(&mark.to_bytes(), mark.offset())?;
        self.file.sync_data()
    }

    /// Forgets the whole conversation, at once and for good: an empty file takes the place of this one.
    ///
    /// # Errors
    /// [`KvFileError::NotSaved`]; the file is as before.
    pub fn clear(&mut self) -> Result<(), KvFileError> {
        let cleared = Blank::new(&self.path, &self.fingerprint).and_then(Blank::replace);
        let (file, synced) = cleared.map_err(|source| KvFileError::NotSaved {
            file: self.path.clone(),
            source,
        })?;
        self.file = file;
        (self.state, self.unmarked, self.replace) = (State::empty(), false, false);
        synced.map_err(|source| KvFileError::Io {
            file: self.path.clone(),
            doing: "sync the directory of",
            source,
        })
    }

    fn begin_anew(
        &mut self,
        history: &[u32],
        cache: &impl KvSource,
        note: &[u8],
    ) -> io::Result<()> {
        let blank = Blank::new(&self.path, &self.fingerprint)?;
        let mut new = KvFile {
            path: self.path.clone(),
            file: blank.file.try_clone()?,
            fingerprint: self.fingerprint,
            found: self.fingerprint,
            state: State::empty(),
            unmarked: false,
            replace: false,
        };
        new.extend(history, cache, note)?;
        let (file, synced) = blank.replace()?;
        new.file = file;
        *self = new;
        synced
    }
}

impl Drop for KvFile {
    fn drop(&mut self) {
        // Closing does that too, unless a process that was just forked still has the file open.
        let _ = self.file.unlock();
    }
}

/// The locked file at `path`; a new one if there is none.
fn find(path: &Path, fingerprint: &Fingerprint) -> Result<File, KvFileError> {
    loop {
        if let Some(file) = disk::open_locked(path)? {
            return Ok(file);
        }
        match Blank::new(path, fingerprint).and_then(Blank::create) {
            Ok(file) => return Ok(file),
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => {
                return Err(KvFileError::Io {
                    file: path.to_path_buf(),
                    doing: "create",
                    source,
                });
            }
        }
    }
}

/// The bytes of the head and the marks, or fewer in a shorter file.
fn beginning(file: &File) -> Result<Vec<u8>, Flaw> {
    let mut bytes = vec![0; 3 * SECTOR];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// The fingerprint of a file that begins with `bytes`, what counts in it, and whether its mark still has to be written.
fn read_all(
    file: &File,
    bytes: &[u8],
    fingerprint: &Fingerprint,
) -> Result<(Fingerprint, State, bool), Flaw> {
    let found = head::check(bytes, fingerprint)?;
    let Some(marks) = bytes.get(SECTOR..).and_then(<[u8]>::first_chunk) else {
        let what = format!("it is truncated: it has only {} bytes", bytes.len());
        return Err(Flaw::Damaged(what));
    };
    let marks = head::marks(marks)?;
    let mut buffer = Vec::new();
    let state = State::read(file, marks.newest, &mut buffer)?;
    if !marks.both
        && let Some(later) = state.turn_after(file, &mut buffer)
    {
        return Ok((found, later, true));
    }
    Ok((found, state, !marks.both))
}
