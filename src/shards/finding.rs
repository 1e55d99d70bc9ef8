//! Describes what keeps a model from being whole, and joins it in one line.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use super::error::Shown;
use super::scan::Numbered;
use crate::stand_in::StandIn;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// No directory has a file that the index or the numbers of the other files name.
    MissingFile,
    /// A file is a link to a file that does not exist.
    DanglingLink,
    /// A file is a git-lfs pointer.
    LfsPointer,
    /// No file has a tensor.
    MissingTensor,
    /// A tensor has another shape or type than the config needs.
    Unfit,
    /// Weights were never written: the file has a hole.
    Hole,
    /// A layer has its experts in two layouts.
    TwoLayouts,
    /// The weights are in a format of other software.
    OtherFormat,
    /// The model has no indexer, although its config has one.
    DenseAttention,
    /// The architecture does not use a tensor.
    UnusedTensor,
    /// The index does not name a file.
    LeftOverFile,
    /// An index names only files that do not exist, and other files have its tensors.
    StaleIndex,
}

/// What a finding prevents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The model cannot run.
    Error,
    /// The model cannot draft.
    Drafts,
    /// The model may compute something else than its makers meant.
    Warning,
    /// Nothing.
    Note,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What is wrong.
    pub kind: Kind,
    /// What it prevents.
    pub severity: Severity,
    /// The tensor.
    pub tensor: Option<String>,
    /// The file: a path, or the name of a file that does not exist.
    pub file: Option<String>,
    /// The finding as a sentence.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl Finding {
    /// A tensor that no file has. `file` is the one that should have it.
    pub fn missing_tensor(tensor: &str, dirs: &str, file: Option<String>) -> Finding {
        let of = file.as_deref().map(|file| format!(", of {}", Shown(file)));
        let problem = format!(
            "tensor {} is missing from {dirs}{}",
            Shown(tensor),
            of.unwrap_or_default()
        );
        Finding {
            kind: Kind::MissingTensor,
            severity: Severity::Error,
            tensor: Some(tensor.to_owned()),
            file,
            problem,
            remedy: "fetch the model again, or take one that fits its config.json".into(),
        }
    }

    /// A file that the index at `list` names for `tensor`, and that no directory has.
    pub(super) fn missing_file(name: &str, list: &Path, tensor: &str) -> Finding {
        Finding {
            kind: Kind::MissingFile,
            severity: Severity::Error,
            tensor: Some(tensor.to_owned()),
            file: Some(name.to_owned()),
            problem: format!("{} is missing, which {} names", Shown(name), list.display()),
            remedy: INCOMPLETE.into(),
        }
    }

    /// A file that the numbers of other files imply.
    pub(super) fn missing_number(name: String, dirs: &str) -> Finding {
        Finding {
            kind: Kind::MissingFile,
            severity: Severity::Error,
            tensor: None,
            problem: format!(
                "{} is missing from {dirs}, as the names of the other files say",
                Shown(&name)
            ),
            file: Some(name),
            remedy: INCOMPLETE.into(),
        }
    }

    /// A file that is a stand-in.
    pub(super) fn stand_in(path: &Path, stand_in: &StandIn) -> Finding {
        Finding {
            kind: match stand_in {
                StandIn::Link(_) => Kind::DanglingLink,
                StandIn::Pointer => Kind::LfsPointer,
            },
            severity: Severity::Error,
            tensor: None,
            file: Some(path.display().to_string()),
            problem: format!("{} {stand_in}", path.display()),
            remedy: stand_in.remedy(path),
        }
    }

    /// The layer in the name of the tensor.
    fn layer(&self) -> Option<usize> {
        let mut parts = self.tensor.as_deref()?.split('.');
        parts.find_map(|part| part.parse().ok())
    }

    /// Findings of one group are described together.
    fn group(&self) -> (Kind, Severity, &str) {
        let by = match self.kind {
            Kind::MissingTensor | Kind::Hole => self.file.as_deref().unwrap_or_default(),
            Kind::OtherFormat => &self.remedy,
            _ => "",
        };
        (self.kind, self.severity, by)
    }
}

const INCOMPLETE: &str = "the download is incomplete, or the model has one more directory to give";

/// Everything that was found in a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Findings(pub Vec<Finding>);

/// Groups in a line; there are more only if many files lack tensors.
const MAX_GROUPS: usize = 8;

impl Findings {
    /// Those of some severities.
    #[must_use]
    pub fn only(&self, severities: &[Severity]) -> Findings {
        let found = self.0.iter().filter(|f| severities.contains(&f.severity));
        Findings(found.cloned().collect())
    }

    /// Those that keep the model from running.
    #[must_use]
    pub fn errors(&self) -> Findings {
        self.only(&[Severity::Error])
    }

    /// Those that keep the model from running or from drafting.
    #[must_use]
    pub fn lacks(&self) -> Findings {
        self.only(&[Severity::Error, Severity::Drafts])
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Findings that are alike, each group as one sentence without its remedy, and the remedy.
    fn sentences<'a>(&'a self) -> Vec<(String, &'a str)> {
        let mut groups: Vec<Vec<&'a Finding>> = Vec::new();
        let mut places = HashMap::new();
        for finding in &self.0 {
            let place = *places.entry(finding.group()).or_insert(groups.len());
            match groups.get_mut(place) {
                Some(group) => group.push(finding),
                None => groups.push(vec![finding]),
            }
        }
        let remedy = |group: &[&'a Finding]| group[0].remedy.as_str();
        let groups = groups.iter();
        groups
            .map(|group| (describe(group), remedy(group)))
            .collect()
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sentences = self.sentences();
        for (i, (text, remedy)) in sentences.iter().enumerate().take(MAX_GROUPS) {
            let semicolon = if i > 0 { "; " } else { "" };
            write!(f, "{semicolon}{text}")?;
            let next = sentences.get(i + 1).filter(|_| i + 1 < MAX_GROUPS);
            if !remedy.is_empty() && next.is_none_or(|(_, next)| next != remedy) {
                write!(f, ": {remedy}")?;
            }
        }
        match sentences.len().saturating_sub(MAX_GROUPS) {
            0 => Ok(()),
            more => write!(f, "; and {more} more files lack tensors"),
        }
    }
}

/// One sentence about findings of one group.
fn describe(group: &[&Finding]) -> String {
    let first = group[0];
    let tensors: Vec<&&Finding> = group.iter().filter(|f| f.tensor.is_some()).collect();
    let (count, layers) = (tensors.len(), layers(group));
    let tensor = tensors.first().and_then(|f| f.tensor.as_deref());
    let tensor = Shown(tensor.unwrap_or_default());
    let files: BTreeSet<&str> = group.iter().filter_map(|f| f.file.as_deref()).collect();
    let mut files: Vec<&str> = files.into_iter().collect();
    // Numbers need not have leading zeros.
    files.sort_by_key(|file| number(file));
    match first.kind {
        Kind::MissingTensor if count > 1 => {
            let mut text = format!("{count} tensors are missing, first {tensor}");
            if !layers.is_empty() {
                text = format!("{layers}: {text}");
            }
            if let Some(file) = &first.file {
                let _ = write!(text, ", of {}", Shown(file));
            }
            text
        }
        Kind::MissingFile | Kind::DanglingLink | Kind::LfsPointer | Kind::LeftOverFile => {
            let mut text = match files.len() {
                0 | 1 => first.problem.clone(),
                // The target of one tells where all of them should be.
                n if first.kind == Kind::DanglingLink => {
                    let of_first = |file: &&&str| Some(**file) != first.file.as_deref();
                    let others: Vec<&str> = files.iter().filter(of_first).copied().collect();
                    format!(
                        "{}, and {} more like it: {}",
                        first.problem,
                        n - 1,
                        ranges(&others)
                    )
                }
                n => {
                    let end = match first.kind {
                        // What follows tells where from, or which index names them.
                        Kind::MissingFile => match first.problem.split_once(" is missing") {
                            Some((_, rest)) => &format!("files are missing{rest}"),
                            None => "files are missing",
                        },
                        Kind::LfsPointer => "files are git-lfs pointers, not the files themselves",
                        _ => "files are not named by the index and are left out",
                    };
                    format!("{n} {end}: {}", ranges(&files))
                }
            };
            if count == 1 {
                let _ = write!(text, " for tensor {tensor}");
            } else if count > 1 {
                let of = if layers.is_empty() { "" } else { " of " };
                let _ = write!(text, ", for {count} tensors{of}{layers}, first {tensor}");
            }
            text
        }
        _ if count > 1 => {
            let of = if layers.is_empty() { "" } else { " of " };
            let (problem, more) = (&first.problem, count - 1);
            format!("{problem}, and {more} more like it{of}{layers}")
        }
        _ => first.problem.clone(),
    }
}

/// The layers of findings, like "layers 2-3 and 6-7"; empty without any.
fn layers(group: &[&Finding]) -> String {
    let layers: BTreeSet<usize> = group.iter().filter_map(|f| f.layer()).collect();
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for layer in layers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == layer => *end = layer,
            _ => runs.push((layer, layer)),
        }
    }
    let shown = runs.iter().map(|(start, end)| match end - start {
        0 => start.to_string(),
        _ => format!("{start}-{end}"),
    });
    let shown: Vec<String> = shown.collect();
    match shown.split_last() {
        None => String::new(),
        Some((only, [])) if !only.contains('-') => format!("layer {only}"),
        Some((only, [])) => format!("layers {only}"),
        Some((last, rest)) => format!("layers {} and {last}", rest.join(", ")),
    }
}

/// Files by name. Three and more with successive numbers become a range.
fn ranges(files: &[&str]) -> String {
    const MOST: usize = 12;
    let mut runs: Vec<Vec<&str>> = Vec::new();
    for file in files {
        let follows = |before: &&str| match (number(before), number(file)) {
            (Some((a, x)), Some((b, y))) => a == b && x + 1 == y,
            _ => false,
        };
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(follows) => run.push(file),
            _ => runs.push(vec![file]),
        }
    }
    let shown = runs.iter().flat_map(|run| match run.as_slice() {
        [first, .., last] if run.len() > 2 => vec![format!("{} to {}", Shown(first), Shown(last))],
        few => few.iter().map(|file| Shown(file).to_string()).collect(),
    });
    let shown: Vec<String> = shown.collect();
    let mut text = shown[..shown.len().min(MOST)].join(", ");
    if shown.len() > MOST {
        let _ = write!(text, " and {} more", shown.len() - MOST);
    }
    text
}

/// The series that the name of a file belongs to, and its number.
fn number(file: &str) -> Option<((&str, &str), u64)> {
    let numbered = Numbered::parse(file.as_ref())?;
    Some(((numbered.stem, numbered.of), numbered.number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(layers: &[usize], file: Option<&str>) -> Findings {
        let finding = |layer| {
            let name = format!("model.layers.{layer}.norm.weight");
            Finding::missing_tensor(&name, "dir", file.map(str::to_owned))
        };
        Findings(layers.iter().map(finding).collect())
    }

    #[test]
    fn many_tensors_are_one_short_line() {
        assert!(missing(&[3], None).to_string().starts_with(
            "tensor model.layers.3.norm.weight is missing from dir: fetch the model again"
        ));
        let line = missing(&[3, 4, 5, 7, 9, 10], Some("a.safetensors")).to_string();
        assert!(
            line.starts_with(
                "layers 3-5, 7 and 9-10: 6 tensors are missing, first model.layers.3.norm.weight, of a.safetensors: "
            ),
            "{line}"
        );
    }

    #[test]
    fn many_files_are_one_short_line() {
        let name = |n: u32| format!("m-{n:05}-of-00150.safetensors");
        let file = |n| {
            let tensor = format!("model.layers.{n}.norm.weight");
            Finding::missing_file(&name(n), Path::new("list"), &tensor)
        };
        let files = Findings((2..=90).chain([95]).map(file).collect());
        assert_eq!(
            files.to_string(),
            format!(
                "90 files are missing, which list names: {} to {}, {}, for 90 tensors of layers 2-90 and 95, first \
                 model.layers.2.norm.weight: {INCOMPLETE}",
                name(2),
                name(90),
                name(95)
            )
        );
    }

    #[test]
    fn a_remedy_is_given_once() {
        let mut both = missing(&[1, 2], Some("a"));
        both.0.extend(missing(&[3], Some("b")).0);
        let line = both.to_string();
        assert_eq!(line.matches("fetch the model again").count(), 1, "{line}");
        let files: Vec<String> = (0..30).map(|n| format!("{n}.safetensors")).collect();
        let many = files.iter().flat_map(|file| missing(&[1, 2], Some(file)).0);
        let line = Findings(many.collect()).to_string();
        assert!(line.ends_with("; and 22 more files lack tensors"), "{line}");
    }
}
