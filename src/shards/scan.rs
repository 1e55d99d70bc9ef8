//! Finds the shards of a model, and checks that none is missing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use colibri_ring::File;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

use super::error::{ShardError, Shown};

/// The list of shards that Hugging Face directories carry.
const LIST: &str = "model.safetensors.index.json";

/// More than the list of the largest known model by an order of magnitude, in bytes.
const MAX_LIST: u64 = 256 << 20;

/// Refuses an empty list of directories, and one directory given twice under any path: the user meant another one.
pub(super) fn check_distinct(dirs: &[PathBuf]) -> Result<(), ShardError> {
    if dirs.is_empty() {
        return Err(ShardError::NoDirectory);
    }
    let mut seen: HashMap<PathBuf, &PathBuf> = HashMap::new();
    for dir in dirs {
        let canonical = dir.canonicalize().map_err(|source| ShardError::List {
            dir: dir.clone(),
            source,
        })?;
        if let Some(first) = seen.insert(canonical, dir) {
            return Err(ShardError::SameDirectory {
                first: first.clone(),
                second: dir.clone(),
            });
        }
    }
    Ok(())
}

/// The shards of one directory by name: the regular files and links that `*.safetensors` matches in a shell. The caches of Hugging
/// Face consist of links.
///
/// A broken link counts, so that opening it reports what is missing.
pub(super) fn shards(dir: &Path) -> Result<Vec<PathBuf>, ShardError> {
    let failed = |source| ShardError::List {
        dir: dir.to_path_buf(),
        source,
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if name.as_bytes().starts_with(b".") || !name.as_bytes().ends_with(b".safetensors") {
            continue;
        }
        let path = entry.path();
        if std::fs::metadata(&path).map_or(true, |m| m.is_file()) {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(ShardError::NoShards {
            dir: dir.to_path_buf(),
        });
    }
    found.sort_unstable();
    Ok(found)
}

/// Refuses shards whose names number another one, like `model-00001-of-00002.safetensors` alone. For models without a list: those with one
/// may have been cut to fewer files.
pub(super) fn check_numbered(
    dirs: &[PathBuf],
    present: &HashSet<&OsStr>,
) -> Result<(), ShardError> {
    let mut series: BTreeMap<(&str, &str), Vec<Numbered<'_>>> = BTreeMap::new();
    for shard in present.iter().filter_map(|name| Numbered::parse(name)) {
        series
            .entry((shard.stem, shard.of))
            .or_default()
            .push(shard);
    }
    for ((stem, of), shards) in series {
        let Ok(count) = of.parse::<u64>() else {
            continue;
        };
        let numbers: BTreeSet<u64> = shards.iter().map(|shard| shard.number).collect();
        // Some series start at 0.
        let first = u64::from(!numbers.contains(&0));
        let missing = (first..count.saturating_add(first)).find(|n| !numbers.contains(n));
        if let Some(missing) = missing {
            let width = shards[0].width;
            return Err(ShardError::Unfinished {
                shard: format!("{stem}-{missing:0width$}-of-{of}.safetensors"),
                dirs: dirs.to_vec(),
            });
        }
    }
    Ok(())
}

/// A name like `model-00001-of-00002.safetensors`.
struct Numbered<'a> {
    stem: &'a str,
    number: u64,
    /// Digits of the number.
    width: usize,
    of: &'a str,
}

impl<'a> Numbered<'a> {
    fn parse(name: &'a OsStr) -> Option<Numbered<'a>> {
        let (rest, of) = (name.to_str()?.strip_suffix(".safetensors")?).rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        (digits(number) && digits(of)).then_some(())?;
        Some(Numbered {
            stem,
            number: number.parse().ok()?,
            width: number.len(),
            of,
        })
    }
}

/// Tensors that a directory's list expects in files that no directory has.
#[derive(Debug)]
pub(super) struct Absent {
    list: PathBuf,
    /// Name of the tensor, name of the file.
    tensors: Vec<(String, String)>,
}

impl Absent {
    /// Compares the list of `dir`, if it has one, with the names of the shards of all directories: a model
    /// that is split over directories keeps its whole list in each.
    pub(super) fn read(
        dir: &Path,
        present: &HashSet<&OsStr>,
    ) -> Result<Option<Absent>, ShardError> {
        let list = dir.join(LIST);
        if !list.exists() {
            return Ok(None);
        }
        let file = File::open(&list)?;
        let bad = |reason: String| ShardError::BadList {
            list: list.clone(),
            reason,
        };
        if file.size() > MAX_LIST {
            return Err(bad(format!("it has {} bytes", file.size())));
        }
        let mut text = vec![0; file.size() as usize];
        file.read_at(&mut text, 0)?;
        let parsed = std::str::from_utf8(&text)
            .map_err(|e| e.to_string())
            .and_then(|text| {
                let mut json = serde_json::Deserializer::from_str(text);
                let absent = ListSeed(present).deserialize(&mut json);
                absent
                    .and_then(|absent| json.end().map(|()| absent))
                    .map_err(|e| e.to_string())
            });
        let tensors = parsed.map_err(|reason| bad(Shown(&reason).to_string()))?;
        Ok(Some(Absent { list, tensors }))
    }

    /// The error, if one of the tensors is in no shard.
    ///
    /// An absent file alone is not an error: a converter may have left the list of the original with files of other names.
    pub(super) fn check(self, has: impl Fn(&str) -> bool) -> Result<(), ShardError> {
        match self.tensors.into_iter().find(|(tensor, _)| !has(tensor)) {
            Some((tensor, shard)) => Err(ShardError::Incomplete {
                list: self.list,
                shard,
                tensor,
            }),
            None => Ok(()),
        }
    }
}

/// Parses the list and keeps only tensors whose file is absent, so that the usual list of 100,000 tensors takes no memory.
#[derive(Clone, Copy)]
struct ListSeed<'a>(&'a HashSet<&'a OsStr>);

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    WeightMap,
    #[serde(other)]
    Other,
}

impl<'de> DeserializeSeed<'de> for ListSeed<'_> {
    type Value = Vec<(String, String)>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ListSeed<'_> {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut absent = Vec::new();
        while let Some(field) = map.next_key()? {
            match field {
                Field::WeightMap => absent = map.next_value_seed(WeightMap(self.0))?,
                Field::Other => {
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
        }
        Ok(absent)
    }
}

struct WeightMap<'a>(&'a HashSet<&'a OsStr>);

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = Vec<(String, String)>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensors to files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut absent = Vec::new();
        while let Some((tensor, file)) = map.next_entry::<Text<'de>, Text<'de>>()? {
            if !self.0.contains(OsStr::new(&*file.0)) {
                absent.push((tensor.0.into_owned(), file.0.into_owned()));
            }
        }
        Ok(absent)
    }
}

/// A string that is borrowed from the text unless it has escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);
