//! Finds the model fixtures and the reference's record of each.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// A fixture and the reference's record of it.
pub struct Saved {
    pub name: String,
    /// One directory, or those of a split model.
    pub dirs: Vec<PathBuf>,
    pub expected: Value,
}

/// Where the fixtures are: `COLIBRI_FIXTURES`, else those of the repository.
pub fn root() -> PathBuf {
    match std::env::var_os("COLIBRI_FIXTURES") {
        Some(dir) => PathBuf::from(dir),
        None => shipped(),
    }
}

/// The fixtures of the repository.
pub fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Every model under [`root`]: each directory with an `expected.json`.
pub fn all() -> Vec<Saved> {
    let root = root();
    let mut dirs = entries(&root);
    dirs.retain(|dir| dir.join("expected.json").is_file());
    assert!(!dirs.is_empty(), "no fixtures in {}", root.display());
    dirs.iter().map(|dir| Saved::at(dir)).collect()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    paths.sort();
    paths
}

impl Saved {
    /// The fixture of the repository with that name.
    pub fn named(name: &str) -> Saved {
        Saved::at(&shipped().join(name))
    }

    /// Subdirectories, if there are any, are a split model.
    pub fn at(dir: &Path) -> Saved {
        let mut dirs = entries(dir);
        dirs.retain(|part| part.is_dir());
        if dirs.is_empty() {
            dirs.push(dir.to_path_buf());
        }
        let text = std::fs::read(dir.join("expected.json")).unwrap();
        Saved {
            name: dir.file_name().unwrap().to_str().unwrap().to_string(),
            dirs,
            expected: serde_json::from_slice(&text).unwrap(),
        }
    }

    /// A list of token ids in `expected.json`, by its JSON pointer.
    pub fn ids(&self, path: &str) -> Vec<u32> {
        let list = self.expected.pointer(path).unwrap().as_array().unwrap();
        list.iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    /// A list of numbers in `expected.json`, by its JSON pointer.
    pub fn floats(&self, path: &str) -> Vec<f32> {
        let list = self.expected.pointer(path).unwrap().as_array().unwrap();
        list.iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }
}
