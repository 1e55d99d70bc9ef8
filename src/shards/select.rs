//! Selects the files of a model among those of its directories, and the file that counts where several have a tensor.
//!
//! The index of a directory decides, as in transformers: a file that it does not name is left out, and a file that it names must
//! exist. In a directory without an index every file counts.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::path::PathBuf;

use super::error::{ShardError, list as join};
use super::finding::{Finding, Kind, Severity};
use super::list::{LIST, List};
use super::scan;
use crate::stand_in::StandIn;

/// A file of a directory.
struct Candidate {
    dir: usize,
    path: PathBuf,
    /// It is a stand-in.
    broken: Option<Finding>,
    /// Whether an index names it.
    named: bool,
}

impl Candidate {
    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

/// What was selected.
#[derive(Debug)]
pub(super) struct Selection {
    /// The files that count, with the index of their directories: by directory, then by name.
    pub files: Vec<(usize, PathBuf)>,
    /// By file: whether an index names it.
    named: Vec<bool>,
    /// The indices, the one that names files of most directories first.
    pub lists: Vec<Ranked>,
    /// Indices that name no file that exists.
    stale: Vec<List>,
    pub findings: Vec<Finding>,
    /// By index: tensor -> name of its file.
    tensors: OnceCell<Vec<HashMap<String, String>>>,
}

/// An index whose files exist, at least some.
#[derive(Debug)]
pub(super) struct Ranked {
    pub list: List,
    /// Number of directories that it names files of.
    reach: usize,
    /// Name -> place in [`Selection::files`].
    places: HashMap<String, usize>,
}

impl Selection {
    /// Selects among the files of `dirs`.
    pub(super) fn new(dirs: &[PathBuf]) -> Result<Selection, ShardError> {
        let mut found = Vec::new();
        for (dir, path) in dirs.iter().enumerate() {
            for path in scan::shards(path)? {
                let broken = StandIn::find(&path);
                found.push(Candidate {
                    dir,
                    broken: broken.map(|stand_in| Finding::stand_in(&path, &stand_in)),
                    path,
                    named: false,
                });
            }
        }
        let mut findings = Vec::new();
        let lists = lists(dirs, &found, &mut findings)?;
        let (mut live, mut stale) = (Vec::new(), Vec::new());
        for list in lists {
            let resolved: Vec<(String, usize)> = (list.files.iter())
                .filter_map(|name| Some((name.clone(), resolve(&found, list.dir, name)?)))
                .collect();
            match resolved.is_empty() {
                true => stale.push(list),
                false => live.push((list, resolved)),
            }
        }
        for (_, resolved) in &live {
            resolved.iter().for_each(|(_, i)| found[*i].named = true);
        }
        let indexed: HashSet<usize> = live.iter().map(|(list, _)| list.dir).collect();
        for (list, _) in &mut live {
            let absent = std::mem::take(&mut list.absent);
            findings.extend(absent.iter().map(|(tensor, file)| {
                let finding = Finding::missing_file(file, &list.path, tensor);
                broken_as(&found, list.dir, file).map_or(finding, |broken| Finding {
                    tensor: Some(tensor.clone()),
                    ..broken.clone()
                })
            }));
        }
        if live.is_empty() && stale.is_empty() {
            let present: HashSet<&OsStr> = found.iter().map(Candidate::name).collect();
            let numbers = scan::missing_numbers(&present);
            let missing = numbers.into_iter().filter(|name| name.contains("-of-"));
            findings.extend(missing.map(|name| Finding::missing_number(name, &join(dirs))));
        }
        let (mut files, mut named, mut places) = (Vec::new(), Vec::new(), HashMap::new());
        for (i, file) in found.into_iter().enumerate() {
            if !file.named && indexed.contains(&file.dir) {
                if file.broken.is_none() {
                    findings.push(left_over(&file));
                }
                continue;
            }
            if let Some(broken) = file.broken {
                // Reported already where an index names it.
                if !indexed.contains(&file.dir) {
                    findings.push(broken);
                }
                continue;
            }
            places.insert(i, files.len());
            files.push((file.dir, file.path));
            named.push(file.named);
        }
        let mut lists: Vec<Ranked> = live
            .into_iter()
            .map(|(list, resolved)| Ranked {
                list,
                places: (resolved.into_iter())
                    .filter_map(|(name, i)| Some((name, *places.get(&i)?)))
                    .collect(),
                reach: 0,
            })
            .collect();
        for ranked in &mut lists {
            let dirs: HashSet<usize> = ranked.places.values().map(|i| files[*i].0).collect();
            ranked.reach = dirs.len();
        }
        lists.sort_by_key(|ranked| std::cmp::Reverse(ranked.reach));
        Ok(Selection {
            files,
            named,
            lists,
            stale,
            findings,
            tensors: OnceCell::new(),
        })
    }

    /// The file that counts for a tensor which is in the files `first` and `second`; `None` if no index decides.
    pub(super) fn decide(
        &self,
        tensor: &str,
        first: usize,
        second: usize,
    ) -> Result<Option<usize>, ShardError> {
        if !self.named[first] || !self.named[second] {
            return Ok(None);
        }
        let tensors = match self.tensors.get() {
            Some(tensors) => tensors,
            None => {
                let read = self.lists.iter().map(|ranked| ranked.list.tensors());
                let read = read.collect::<Result<_, _>>()?;
                self.tensors.get_or_init(|| read)
            }
        };
        let named = self.lists.iter().zip(tensors).filter_map(|(ranked, of)| {
            let place = ranked.places.get(of.get(tensor)?)?;
            Some((ranked.reach, *place))
        });
        let named: Vec<(usize, usize)> = named.collect();
        let Some(&(reach, place)) = named.first() else {
            return Ok(None);
        };
        // Two indices that know as much contradict each other.
        let agreed = named.iter().all(|(r, p)| *r < reach || *p == place);
        Ok(agreed.then_some(place))
    }

    /// What is wrong with indices that name no file that exists. A converter may leave the index of the original with
    /// files of other names: then the files of that directory have its tensors. `find` gives the file of a tensor.
    pub(super) fn check_stale(&mut self, find: impl Fn(&str) -> Option<usize>) {
        for list in std::mem::take(&mut self.stale) {
            let absent = list.absent.iter();
            let places: Vec<_> = absent.clone().map(|(tensor, _)| find(tensor)).collect();
            let own = |file: &usize| self.files[*file].0 == list.dir;
            if places.iter().all(Option::is_some) && places.iter().flatten().any(own) {
                self.findings.push(Finding {
                    kind: Kind::StaleIndex,
                    severity: Severity::Note,
                    tensor: None,
                    file: Some(list.path.display().to_string()),
                    problem: format!(
                        "{} names only files that do not exist, and is ignored",
                        list.path.display()
                    ),
                    remedy: String::new(),
                });
                continue;
            }
            let any_missing = places.iter().any(Option::is_none);
            let lacks = absent
                .zip(places)
                .filter(|(_, place)| place.is_none() == any_missing);
            self.findings.extend(
                lacks.map(|((tensor, file), _)| Finding::missing_file(file, &list.path, tensor)),
            );
        }
    }
}

/// The indices of the directories.
fn lists(
    dirs: &[PathBuf],
    found: &[Candidate],
    findings: &mut Vec<Finding>,
) -> Result<Vec<List>, ShardError> {
    let whole = found.iter().filter(|file| file.broken.is_none());
    let present: HashSet<&OsStr> = whole.map(Candidate::name).collect();
    let mut lists = Vec::new();
    for (i, dir) in dirs.iter().enumerate() {
        let path = dir.join(LIST);
        if let Some(stand_in) = StandIn::find(&path) {
            findings.push(Finding::stand_in(&path, &stand_in));
        } else if path.exists() {
            lists.push(List::read(path, i, &present)?);
        }
    }
    Ok(lists)
}

/// The file that the index of directory `dir` means: that of its directory, or the first one of another.
fn resolve(found: &[Candidate], dir: usize, name: &str) -> Option<usize> {
    let same = |file: &&(usize, &Candidate)| file.1.name() == OsStr::new(name);
    let files: Vec<_> = found.iter().enumerate().collect();
    let mut named = files.iter().filter(same);
    let first = named.clone().next();
    let own = named.find(|(_, file)| file.dir == dir);
    own.or(first).map(|(i, _)| *i)
}

/// The finding about a broken file that the index of directory `dir` names.
fn broken_as<'a>(found: &'a [Candidate], dir: usize, name: &str) -> Option<&'a Finding> {
    found[resolve(found, dir, name)?].broken.as_ref()
}

fn left_over(file: &Candidate) -> Finding {
    let shown = file.path.display();
    Finding {
        kind: Kind::LeftOverFile,
        severity: Severity::Note,
        tensor: None,
        file: Some(shown.to_string()),
        problem: format!("{shown} is not named by the index and is left out"),
        remedy: String::new(),
    }
}
