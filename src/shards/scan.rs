//! Finds the safetensors files of directories, and the gaps in their numbers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::error::ShardError;

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
/// A broken link counts, so that it is reported.
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
            others: other_weights(dir),
        });
    }
    found.sort_unstable();
    Ok(found)
}

/// Weights of another kind in a directory without shards, and what to take instead.
pub fn other_weights(dir: &Path) -> Option<String> {
    const OTHERS: [(&str, &str); 6] = [
        (".gguf", "GGUF, the format of llama.cpp"),
        (".bin", "a PyTorch checkpoint"),
        (".pth", "a PyTorch checkpoint"),
        (".pt", "a PyTorch checkpoint"),
        (".ckpt", "a PyTorch checkpoint"),
        (".h5", "a Keras checkpoint"),
    ];
    let mut names: Vec<_> = std::fs::read_dir(dir).ok()?.flatten().collect();
    names.sort_by_key(std::fs::DirEntry::file_name);
    OTHERS.iter().find_map(|(end, what)| {
        let ends = |name: &std::ffi::OsString| name.as_bytes().ends_with(end.as_bytes());
        let found = names.iter().map(std::fs::DirEntry::file_name).find(ends)?;
        Some(format!(
            "{} is {what}: take the safetensors files of the model",
            Path::new(&found).display()
        ))
    })
}

/// The files that the names of others number, like `model-00002-of-00002.safetensors` where there is only the first. One for each
/// series: without the end of a series, its length is unknown.
pub(super) fn missing_numbers(present: &HashSet<&OsStr>) -> Vec<String> {
    let mut series: BTreeMap<(&str, &str), Vec<Numbered<'_>>> = BTreeMap::new();
    for shard in present.iter().filter_map(|name| Numbered::parse(name)) {
        series
            .entry((shard.stem, shard.of))
            .or_default()
            .push(shard);
    }
    let mut missing = Vec::new();
    for ((stem, of), shards) in series {
        let numbers: BTreeSet<u64> = shards.iter().map(|shard| shard.number).collect();
        // Some series start at 0.
        let first = u64::from(!numbers.contains(&0));
        let end = match of.parse::<u64>() {
            Ok(count) => count.saturating_add(first),
            // Between the lowest and the highest number.
            Err(_) if of.is_empty() => numbers.last().copied().unwrap_or(0),
            Err(_) => continue,
        };
        let first = match of {
            "" => numbers.first().copied().unwrap_or(0),
            _ => first,
        };
        let width = shards[0].width;
        let end_of_name = if of.is_empty() {
            String::new()
        } else {
            format!("-of-{of}")
        };
        let gaps = (first..end).filter(|n| !numbers.contains(n));
        missing.extend(
            gaps.take(MAX_NUMBERS)
                .map(|n| format!("{stem}-{n:0width$}{end_of_name}.safetensors")),
        );
    }
    missing
}

/// Most files of a series that are reported as missing: a name may claim any number.
const MAX_NUMBERS: usize = 1000;

/// A name like `model-00001-of-00002.safetensors`, or `model-00001.safetensors`.
pub(super) struct Numbered<'a> {
    pub stem: &'a str,
    pub number: u64,
    /// Digits of the number.
    width: usize,
    /// How many there are; empty where the name does not say it.
    pub of: &'a str,
}

impl<'a> Numbered<'a> {
    pub(super) fn parse(name: &'a OsStr) -> Option<Numbered<'a>> {
        let name = name.to_str()?.strip_suffix(".safetensors")?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let (rest, of) = name
            .rsplit_once("-of-")
            .filter(|(_, of)| digits(of))
            .unwrap_or((name, ""));
        let (stem, number) = rest.rsplit_once('-')?;
        digits(number).then_some(())?;
        Some(Numbered {
            stem,
            number: number.parse().ok()?,
            width: number.len(),
            of,
        })
    }
}
