//! Copies a fixture to corrupt it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::common::Saved;
use crate::process::{error_of, finish, on_model};

#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

/// A shard in memory.
pub struct Shard {
    pub tensors: Vec<Tensor>,
}

impl Shard {
    pub fn read(path: &Path) -> Shard {
        let file = fs::read(path).unwrap();
        let (header, data) = split(&file);
        let map: Map<String, Value> = serde_json::from_slice(header).unwrap();
        let mut tensors = Vec::new();
        for (name, entry) in map {
            if name == "__metadata__" {
                continue;
            }
            let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            tensors.push(Tensor {
                name,
                dtype: entry["dtype"].as_str().unwrap().to_owned(),
                shape: serde_json::from_value(entry["shape"].clone()).unwrap(),
                data: data[at(0)..at(1)].to_vec(),
            });
        }
        Shard { tensors }
    }

    pub fn write(&self, path: &Path) {
        let (mut map, mut data) = (Map::new(), Vec::new());
        for tensor in &self.tensors {
            let start = data.len();
            data.extend_from_slice(&tensor.data);
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]});
            map.insert(tensor.name.clone(), entry);
        }
        fs::write(path, join(&serde_json::to_vec(&map).unwrap(), &data)).unwrap();
    }
}

/// Splits a shard into header and data.
pub fn split(file: &[u8]) -> (&[u8], &[u8]) {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[8..].split_at(len)
}

/// Makes a shard of a header and data.
pub fn join(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

/// The tensor's role: its name without the numbers of layer and expert.
pub fn kind(name: &str) -> String {
    let parts = name.split('.');
    let words: Vec<_> = parts.filter(|part| part.parse::<u32>().is_err()).collect();
    words.join(".")
}

/// Makes a named pipe, which blocks a reader until a writer opens it.
pub fn mkfifo(path: &Path) {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a C string that lives through the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// A model in a temporary directory.
pub struct Broken {
    dir: TempDir,
}

impl Broken {
    /// Copies a fixture into one directory.
    pub fn copy(name: &str) -> Broken {
        let dir = tempfile::tempdir().unwrap();
        for from in Saved::named(name).dirs {
            for entry in fs::read_dir(from).unwrap() {
                let path = entry.unwrap().path();
                fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        Broken { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The shards, in order.
    pub fn shards(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path()).unwrap();
        let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
        paths.sort();
        paths
    }

    /// Changes the tensors of the shard that holds the tensor `name`.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Vec<Tensor>, usize)) {
        for path in self.shards() {
            let mut shard = Shard::read(&path);
            if let Some(at) = shard.tensors.iter().position(|t| t.name == name) {
                change(&mut shard.tensors, at);
                return shard.write(&path);
            }
        }
        panic!("no tensor {name}");
    }

    /// The first tensor of every kind.
    pub fn kinds(&self) -> Vec<String> {
        let mut names: Vec<String> = (self.shards().iter())
            .flat_map(|path| Shard::read(path).tensors)
            .map(|tensor| tensor.name)
            .collect();
        names.sort();
        let mut seen = std::collections::BTreeSet::new();
        names.retain(|name| seen.insert(kind(name)));
        names
    }

    pub fn config(&self) -> Map<String, Value> {
        serde_json::from_slice(&fs::read(self.file("config.json")).unwrap()).unwrap()
    }

    pub fn set_config(&self, config: &Map<String, Value>) {
        let text = serde_json::to_vec(config).unwrap();
        fs::write(self.file("config.json"), text).unwrap();
    }

    pub fn decode(&self) -> std::process::Command {
        self.run("decode", &["--prompt-ids", "3,4,5", "-n", "3", "--json"])
    }

    pub fn score(&self) -> std::process::Command {
        self.run("score", &["--ids", "3,4,5", "--json"])
    }

    pub fn inspect(&self) -> std::process::Command {
        self.run("inspect", &["--json"])
    }

    pub fn run(&self, command: &str, args: &[&str]) -> std::process::Command {
        on_model(command, &[self.path().to_path_buf()], args)
    }

    /// The error of decode and score, which is the same.
    #[track_caller]
    pub fn refused(&self) -> String {
        let decode = error_of(&finish(self.decode()));
        assert_eq!(error_of(&finish(self.score())), decode);
        decode
    }

    /// The error of decode, score and inspect, which is the same.
    #[track_caller]
    pub fn refused_by_all(&self) -> String {
        let error = self.refused();
        assert_eq!(error_of(&finish(self.inspect())), error);
        error
    }
}
