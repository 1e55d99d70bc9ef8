//! Reads a model's usage history at the start of a run, and adds the run at its end.

use std::path::{Path, PathBuf};

use super::file::{self, FILE_NAME};
use super::{Identity, Usage};

/// The history of a model. A file that cannot be read or written costs one warning.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    model: Identity,
    usage: Option<Usage>,
    /// The name is taken by a file that must not be replaced.
    taken: bool,
}

impl History {
    /// Reads the file in `dir`, the first directory of `model`.
    pub fn open(dir: &Path, model: Identity) -> History {
        let path = dir.join(FILE_NAME);
        let (usage, taken) = match file::read(&path, &model) {
            Ok(usage) => (usage, false),
            Err(error) => {
                tracing::warn!("{error}");
                (None, !error.replaceable())
            }
        };
        History {
            path,
            model,
            usage,
            taken,
        }
    }

    /// The uses in earlier runs.
    pub fn usage(&self) -> Option<&Usage> {
        self.usage.as_ref()
    }

    /// Adds the uses of a run to those in the file, which another run may have updated meanwhile.
    pub fn keep(&self, run: &Usage) {
        if self.taken || run.tokens() == 0 {
            return;
        }
        let mut usage = match file::read(&self.path, &self.model) {
            Ok(usage) => usage,
            Err(error) if error.replaceable() => self.usage.clone(),
            Err(error) => {
                tracing::warn!("{error}");
                return;
            }
        }
        .unwrap_or_else(|| Usage::new(self.model.layers.clone(), run.experts, run.top_k));
        usage.append(run);
        match file::write(&self.path, &usage, &self.model) {
            Ok(()) => tracing::debug!("{} has {} runs", self.path.display(), usage.runs()),
            Err(e) => tracing::warn!(
                "expert usage is not saved: cannot write {}: {e}",
                self.path.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Identity {
        Identity {
            layers: vec![0],
            experts: 3,
            top_k: 1,
            tensors: 1,
            bytes: 1,
        }
    }

    fn run(ids: &[u32]) -> Usage {
        let mut usage = Usage::new(vec![0], 3, 1);
        usage.record(0, ids);
        usage
    }

    #[test]
    fn runs_at_the_same_time_are_both_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (
            History::open(dir.path(), model()),
            History::open(dir.path(), model()),
        );
        a.keep(&run(&[0, 0]));
        b.keep(&run(&[2]));
        a.keep(&run(&[]));
        let found = super::super::read(dir.path(), &model()).unwrap();
        assert_eq!(found.runs(), 2);
        let hottest: Vec<u32> = found.hottest().iter().map(|(_, id, _)| *id).collect();
        assert_eq!(hottest, [0, 2]);
    }

    #[test]
    fn writers_at_once_leave_one_file_that_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let history = History::open(dir.path(), model());
                    (0..5).for_each(|_| history.keep(&run(&[1])));
                });
            }
        });
        let found = file::read(&dir.path().join(FILE_NAME), &model())
            .unwrap()
            .unwrap();
        assert!((5..=20).contains(&found.runs()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_damaged_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        for (content, replaced) in [
            (&b"coliuse"[..], true),
            (b"", true),
            (b"notes of mine", false),
            (b"coliuse\n\x09\0\0\0", false),
        ] {
            std::fs::write(&path, content).unwrap();
            let history = History::open(dir.path(), model());
            assert!(history.usage().is_none());
            history.keep(&run(&[1]));
            assert_eq!(
                std::fs::read(&path).unwrap() != content,
                replaced,
                "{content:?}"
            );
        }
    }
}
