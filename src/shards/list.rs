//! Reads `model.safetensors.index.json`, Hugging Face's index of which file has which tensor.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use colibri_ring::File;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

use super::error::{ShardError, Shown};

/// Its name.
pub(super) const LIST: &str = "model.safetensors.index.json";

/// More than the list of the largest known model by an order of magnitude, in bytes.
const MAX_LIST: u64 = 256 << 20;

/// The list of one directory. The tensors are read again when they are needed, so that 100,000 of them take no memory.
#[derive(Debug)]
pub(super) struct List {
    pub path: PathBuf,
    /// Index of its directory.
    pub dir: usize,
    /// Names of the files that it names.
    pub files: BTreeSet<String>,
    /// Tensors in files that no directory has: the tensor, the name of the file.
    pub absent: Vec<(String, String)>,
}

impl List {
    /// Reads the list at `path`. `present` are the names of the files of all directories: a model that is split over
    /// directories keeps its whole list in each.
    pub fn read(path: PathBuf, dir: usize, present: &HashSet<&OsStr>) -> Result<List, ShardError> {
        let (mut files, mut absent) = (BTreeSet::new(), Vec::new());
        entries(&path, &mut |tensor, file| {
            if !files.contains(file) {
                files.insert(file.to_owned());
            }
            if !present.contains(OsStr::new(file)) {
                absent.push((tensor.to_owned(), file.to_owned()));
            }
        })?;
        Ok(List {
            path,
            dir,
            files,
            absent,
        })
    }

    /// Tensor -> name of its file.
    pub fn tensors(&self) -> Result<HashMap<String, String>, ShardError> {
        let mut tensors = HashMap::new();
        entries(&self.path, &mut |tensor, file| {
            tensors.insert(tensor.to_owned(), file.to_owned());
        })?;
        Ok(tensors)
    }
}

/// Calls `entry` with each tensor of a list and the name of its file.
fn entries(list: &Path, entry: &mut dyn FnMut(&str, &str)) -> Result<(), ShardError> {
    let file = File::open(list)?;
    let bad = |reason: String| ShardError::BadList {
        list: list.to_path_buf(),
        reason,
    };
    if file.size() > MAX_LIST {
        return Err(bad(format!("it has {} bytes", file.size())));
    }
    let mut text = vec![0; file.size() as usize];
    file.read_at(&mut text, 0)?;
    let text = std::str::from_utf8(&text).map_err(|e| bad(e.to_string()))?;
    let mut json = serde_json::Deserializer::from_str(text);
    let read = Whole(entry).deserialize(&mut json);
    let read = read.and_then(|()| json.end());
    read.map_err(|e| bad(Shown(&e.to_string()).to_string()))
}

/// Parses the list.
struct Whole<'a>(&'a mut dyn FnMut(&str, &str));

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    WeightMap,
    #[serde(other)]
    Other,
}

impl<'de> DeserializeSeed<'de> for Whole<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Whole<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key()? {
            match field {
                Field::WeightMap => map.next_value_seed(WeightMap(&mut *self.0))?,
                Field::Other => {
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

/// Parses the object under `weight_map`.
struct WeightMap<'a>(&'a mut dyn FnMut(&str, &str));

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensors to files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((tensor, file)) = map.next_entry::<Text<'de>, Text<'de>>()? {
            (self.0)(&tensor.0, &file.0);
        }
        Ok(())
    }
}

/// A string that is borrowed from the text unless it has escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);
