//! Tries O_DIRECT on a file of a directory.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::file::{DirectAlign, File};

/// The result of an O_DIRECT read in a directory.
#[derive(Debug)]
pub struct DirectReport {
    /// The file; `None` when the directory has no regular file to read.
    pub file: Option<PathBuf>,
    /// Type of the file system, as mount(8) names it, or its number in hexadecimal.
    pub file_system: String,
    /// The alignment of O_DIRECT reads, or why they are not possible.
    pub direct: Result<DirectAlign, String>,
}

/// Tries an O_DIRECT read in `dir`, on its largest regular file.
///
/// # Errors
/// When the directory cannot be listed, or the file cannot be opened at all.
pub fn direct(dir: &Path) -> io::Result<DirectReport> {
    let file = largest_file(dir)?;
    let file_system = file_system_name(rustix::fs::statfs(dir)?.f_type as u64);
    let direct = match &file {
        Some(path) => confirmed_alignment(&File::open(path).map_err(io::Error::other)?),
        None => Err("there is no file in it to try".to_owned()),
    };
    Ok(DirectReport {
        file,
        file_system,
        direct,
    })
}

/// The alignment that a file reports, if a read that has just this alignment succeeds.
fn confirmed_alignment(file: &File) -> Result<DirectAlign, String> {
    let (fd, align) = file.direct_fd()?;
    aligned_read(fd, align).map_err(|error| {
        format!(
            "an O_DIRECT read aligned to {} bytes fails: {error}",
            align.offset
        )
    })?;
    Ok(align)
}

/// Reads once at offset 0. An empty file gives a read of length 0.
fn aligned_read(fd: impl AsFd, align: DirectAlign) -> io::Result<()> {
    let (len, memory) = (align.offset as usize, align.memory.max(1) as usize);
    let mut buffer = vec![0; len.saturating_add(memory)];
    let address = buffer.as_ptr() as usize;
    let start = address.next_multiple_of(memory) - address;
    rustix::io::pread(fd, &mut buffer[start..start + len], 0)?;
    Ok(())
}

/// The largest regular file of a directory.
fn largest_file(dir: &Path) -> io::Result<Option<PathBuf>> {
    let mut largest = None;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        // Follows symbolic links: some model caches are directories of links.
        let Ok(meta) = fs::metadata(&path) else {
            continue;
        };
        if meta.is_file() && largest.as_ref().is_none_or(|(size, _)| meta.len() > *size) {
            largest = Some((meta.len(), path));
        }
    }
    Ok(largest.map(|(_, path)| path))
}

fn file_system_name(magic: u64) -> String {
    let name = match magic {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0xf2f5_2010 => "f2fs",
        0x2fc1_2fc1 => "zfs",
        0xca45_1a4e => "bcachefs",
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        0x794c_7630 => "overlay",
        0x6573_5546 => "fuse",
        0x6969 => "nfs",
        0xff53_4d42 | 0xfe53_4d42 => "cifs",
        0x0102_1997 => "9p",
        0x7366_746e => "ntfs3",
        0x2011_bab0 => "exfat",
        0x7371_7368 => "squashfs",
        _ => return format!("{magic:#x}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_file_systems_count_as_buffered() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        fs::write(dir.path().join("a"), [0; 8192]).unwrap();
        let report = direct(dir.path()).unwrap();
        if report.file_system == "tmpfs" {
            assert!(report.direct.unwrap_err().contains("tmpfs"));
        }
    }

    #[test]
    fn the_largest_file_is_tried() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(largest_file(dir.path()).unwrap(), None);
        fs::write(dir.path().join("config.json"), [0; 10]).unwrap();
        fs::write(dir.path().join("a.safetensors"), [0; 5000]).unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        let report = direct(dir.path()).unwrap();
        assert_eq!(report.file, Some(dir.path().join("a.safetensors")));
        if let Ok(align) = report.direct {
            assert!(align.offset.is_power_of_two() && align.memory.is_power_of_two());
        }
    }

    #[test]
    fn a_directory_without_files_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let report = direct(dir.path()).unwrap();
        assert_eq!(report.file, None);
        assert!(report.direct.unwrap_err().contains("no file"));
    }

    #[test]
    fn a_missing_directory_is_an_error() {
        let error = direct(Path::new("/nonexistent/dir")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
