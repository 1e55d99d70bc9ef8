//! Describes the machine of a measurement.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytesize::ByteSize;
use colibri_ring::probe::{self, huge};
use colibri_ring::{File, mount_of};

use crate::memory::{self, Roots};

/// Kernel, processor, memory, huge pages, and the drives of `files`, each with all directories on it, its file system and O_DIRECT,
/// by name.
pub fn facts(files: &[Arc<File>]) -> Vec<(String, String)> {
    let mut facts = vec![
        ("Kernel".to_owned(), format!("Linux {}", probe::kernel())),
        ("Processor".to_owned(), processor()),
        ("Memory".to_owned(), memory_size()),
        ("Huge pages".to_owned(), huge_pages()),
    ];
    for files in by_drive(files) {
        facts.push((
            format!("Drive of {}", listed(&dirs(&files))),
            drive(files[0]),
        ));
    }
    facts
}

/// The files of each drive, in the order of the first of each.
fn by_drive(files: &[Arc<File>]) -> Vec<Vec<&File>> {
    let mut drives: Vec<Vec<&File>> = Vec::new();
    for file in files {
        let known = drives.iter_mut().find(|of| of[0].drive() == file.drive());
        match known {
            Some(of) => of.push(file),
            None => drives.push(vec![file]),
        }
    }
    drives
}

/// The directories that files are in, each once.
fn dirs<'a>(files: &[&'a File]) -> Vec<&'a Path> {
    let mut dirs = Vec::new();
    for file in files {
        let dir = file.path().parent().unwrap_or(Path::new(""));
        let dir = if dir == Path::new("") {
            Path::new(".")
        } else {
            dir
        };
        if !dirs.contains(&dir) {
            dirs.push(dir);
        }
    }
    dirs
}

/// Names of directories in a sentence: `a, b and c`.
pub fn listed(dirs: &[impl AsRef<Path>]) -> String {
    let names: Vec<String> = (dirs.iter())
        .map(|dir| dir.as_ref().display().to_string())
        .collect();
    match names.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => names.concat(),
    }
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim().to_owned())
    });
    let threads = crate::cpus::default_threads();
    let model = model.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    format!("{model}, {threads} threads")
}

fn memory_size() -> String {
    match memory::available(&Roots::default()) {
        Ok(memory) => format!(
            "{} of {} available",
            human(memory.mem_available),
            human(memory.mem_total)
        ),
        Err(error) => error.to_string(),
    }
}

fn huge_pages() -> String {
    let huge = huge::huge_pages();
    let setting = huge.setting.as_deref().unwrap_or("not in this kernel");
    let granted = if huge.granted() {
        "granted"
    } else {
        "not granted"
    };
    format!("transparent: {setting}, {granted}")
}

fn drive(file: &File) -> String {
    let mount = mount_of(file.path());
    let (source, kind) = mount.map_or_else(
        || ("unknown".into(), "unknown".into()),
        |mount| (mount.source.display().to_string(), mount.kind),
    );
    let direct = match file.direct_fd() {
        Ok((_, align)) => format!("O_DIRECT with offsets aligned to {} bytes", align.offset),
        Err(reason) => format!("no O_DIRECT: {reason}"),
    };
    let model =
        block_device(file.drive()).map_or(String::new(), |described| format!(" ({described})"));
    format!("{source}{model}, {kind}; {direct}")
}

/// Model, size and kind of a block device, as far as the kernel knows them.
fn block_device(drive: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(drive), rustix::fs::minor(drive));
    let disk = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let read = |path: PathBuf| Some(fs::read_to_string(path).ok()?.trim().to_owned());
    let mut words: Vec<String> = Vec::new();
    words.extend(read(disk.join("device/model")));
    if let Some(sectors) = read(disk.join("size")).and_then(|s| s.parse::<u64>().ok()) {
        words.push(human(sectors.saturating_mul(512)));
    }
    match read(disk.join("queue/rotational")).as_deref() {
        Some("0") => words.push("solid state".into()),
        Some("1") => words.push("called rotational by the kernel".into()),
        _ => {}
    }
    (!words.is_empty()).then(|| words.join(", "))
}

fn human(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_is_named_once_with_all_its_directories() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "x").unwrap();
            Arc::new(File::open(path).unwrap())
        };
        let files = [file("a/1"), file("a/2"), file("b/1"), file("c/1")];
        let facts = facts(&files);
        let drives: Vec<_> = (facts.iter())
            .filter(|(name, _)| name.starts_with("Drive of"))
            .collect();
        assert_eq!(drives.len(), 1, "{facts:?}");
        let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(name).display().to_string());
        assert_eq!(drives[0].0, format!("Drive of {a}, {b} and {c}"));
    }
}
