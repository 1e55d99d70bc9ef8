//! Finds the shards of directories, and refuses incomplete models.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use colibri_uring::shards::{ShardError, Shards};

use crate::files::{Dir, entry};

/// The files and tensors that an error says are missing.
fn lacks(error: &ShardError) -> Vec<(Option<&str>, Option<&str>)> {
    let ShardError::NotWhole(findings) = error else {
        panic!("{error}");
    };
    let found = findings.0.iter();
    found
        .map(|f| (f.file.as_deref(), f.tensor.as_deref()))
        .collect()
}

fn one(dir: &Dir, file: &str, tensor: &str) {
    dir.shard(file, &[entry(tensor, "U8", &[1], 0, 1)], &[7]);
}

#[test]
fn a_model_split_over_directories() {
    let (first, second) = (Dir::new(), Dir::new());
    one(&first, "b.safetensors", "b");
    one(&first, "a.safetensors", "a");
    one(&second, "a.safetensors", "c");
    let dirs = [first.path().to_path_buf(), second.path().to_path_buf()];
    let shards = Shards::open(&dirs).unwrap();
    assert_eq!(shards.dirs(), dirs);
    assert_eq!(shards.len(), 3);
    let names: Vec<_> = shards.iter().map(|t| t.name).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let of: Vec<_> = (0..3).map(|file| shards.dir_of(file)).collect();
    assert_eq!(of, [0, 0, 1]);
    assert_eq!(shards.get("c").unwrap().file, 2);
    let text = shards.get("d").unwrap_err().to_string();
    for part in [
        "tensor d",
        &dirs[0].display().to_string(),
        &dirs[1].display().to_string(),
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn only_regular_files_of_that_name_are_shards() {
    let dir = Dir::new();
    let elsewhere = Dir::new();
    one(&elsewhere, "blob", "linked");
    symlink(
        elsewhere.path().join("blob"),
        dir.path().join("link.safetensors"),
    )
    .unwrap();
    fs::create_dir(dir.path().join("directory.safetensors")).unwrap();
    fs::write(dir.path().join(".hidden.safetensors"), "junk").unwrap();
    fs::write(dir.path().join("model.safetensors.part"), "junk").unwrap();
    let shards = Shards::open(&dir.dirs()).unwrap();
    assert_eq!(shards.files().len(), 1);
    assert!(shards.find("linked").is_some());

    symlink("nowhere", dir.path().join("broken.safetensors")).unwrap();
    let error = Shards::open(&dir.dirs()).unwrap_err();
    let broken = dir.path().join("broken.safetensors");
    assert_eq!(lacks(&error), [(broken.to_str(), None)]);
    let says = format!(
        "is a link to {}, which does not exist",
        dir.path().join("nowhere").display()
    );
    assert!(error.to_string().contains(&says), "{error}");
}

#[test]
fn invalid_directories_are_refused() {
    assert!(matches!(
        Shards::open(&[]).unwrap_err(),
        ShardError::NoDirectory
    ));
    let dir = Dir::new();
    let error = Shards::open(&dir.dirs()).unwrap_err();
    assert!(matches!(error, ShardError::NoShards { dir: d, .. } if d == dir.path()));
    let missing = dir.path().join("missing");
    let error = Shards::open(std::slice::from_ref(&missing)).unwrap_err();
    assert!(matches!(error, ShardError::List { dir: d, .. } if d == missing));
    one(&dir, "a.safetensors", "a");
    let file = dir.path().join("a.safetensors");
    let error = Shards::open(std::slice::from_ref(&file)).unwrap_err();
    assert!(matches!(error, ShardError::List { dir: d, .. } if d == file));
}

#[test]
fn a_directory_given_twice() {
    let dir = Dir::new();
    one(&dir, "a.safetensors", "a");
    let link = Dir::new();
    symlink(dir.path(), link.path().join("same")).unwrap();
    for other in [
        dir.path().to_path_buf(),
        dir.path().join("."),
        link.path().join("same"),
    ] {
        let error = Shards::open(&[dir.path().to_path_buf(), other.clone()]).unwrap_err();
        assert!(matches!(error, ShardError::SameDirectory { second, .. } if second == other));
    }
}

#[test]
fn a_directory_without_permission() {
    let dir = Dir::new();
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    // Root may list every directory, so a thread of another user tries it.
    let error = std::thread::spawn({
        let closed = closed.clone();
        move || {
            if rustix::process::geteuid().is_root() {
                let unprivileged = rustix::thread::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(unprivileged, unprivileged, unprivileged)
                    .unwrap();
            }
            Shards::open(&[closed]).unwrap_err()
        }
    })
    .join()
    .unwrap();
    assert!(error.to_string().contains(&closed.display().to_string()));
    assert!(matches!(error, ShardError::List { source, .. }
        if source.kind() == std::io::ErrorKind::PermissionDenied));
}

#[test]
fn an_incomplete_download() {
    let list = |map: &str| format!(r#"{{"metadata":{{"total_size":2}},"weight_map":{{{map}}}}}"#);
    let name = "model.safetensors.index.json";
    let dir = Dir::new();
    one(&dir, "one.safetensors", "a");
    let both = list(r#""a":"one.safetensors","b":"two.safetensors""#);
    fs::write(dir.path().join(name), &both).unwrap();
    let error = Shards::open(&dir.dirs()).unwrap_err();
    assert_eq!(lacks(&error), [(Some("two.safetensors"), Some("b"))]);
    assert!(error.to_string().contains(name));

    // The other half may be on another drive.
    let second = Dir::new();
    one(&second, "two.safetensors", "b");
    Shards::open(&[dir.path().to_path_buf(), second.path().to_path_buf()]).unwrap();

    // A converter's output, with the list of its source.
    let stale = list(r#""a":"original-1.safetensors""#);
    fs::write(dir.path().join(name), stale).unwrap();
    Shards::open(&dir.dirs()).unwrap();

    for bad in [&both[..20], "[]", r#"{"weight_map":{"a":1}}"#] {
        fs::write(dir.path().join(name), bad).unwrap();
        let error = Shards::open(&dir.dirs()).unwrap_err();
        assert!(matches!(error, ShardError::BadList { .. }), "{error}");
    }
}

/// Without a list, the names of the shards tell their number.
#[test]
fn an_incomplete_download_without_a_list() {
    let missing = |names: &[&str]| {
        let dir = Dir::new();
        for name in names {
            one(&dir, name, name);
        }
        let error = Shards::open(&dir.dirs()).err()?;
        assert!(error.to_string().contains(dir.path().to_str().unwrap()));
        Some(lacks(&error)[0].0?.to_owned())
    };
    let (first, second) = (
        "m-00001-of-00002.safetensors",
        "m-00002-of-00002.safetensors",
    );
    assert_eq!(missing(&[first, second]), None);
    assert_eq!(missing(&[first]).unwrap(), second);
    assert_eq!(missing(&[second]).unwrap(), first);
    // From 0, without zeros before the number, two models at once.
    assert_eq!(
        missing(&["m-0-of-2.safetensors", "m-1-of-2.safetensors"]),
        None
    );
    assert_eq!(
        missing(&["m-0-of-2.safetensors"]).unwrap(),
        "m-1-of-2.safetensors"
    );
    assert_eq!(
        missing(&[
            first,
            second,
            "n-1-of-3.safetensors",
            "n-3-of-3.safetensors"
        ])
        .unwrap(),
        "n-2-of-3.safetensors"
    );
    // No series.
    assert_eq!(
        missing(&["m-x-of-2.safetensors", "m-1-of-.safetensors"]),
        None
    );
    // Numbers too large to count to.
    let many = "m-1-of-18446744073709551615.safetensors";
    assert!(missing(&[many]).unwrap().starts_with("m-2-of-"));
    assert_eq!(
        missing(&["m-1-of-99999999999999999999999.safetensors"]),
        None
    );

    // The other half may be on another drive.
    let (a, b) = (Dir::new(), Dir::new());
    one(&a, first, "a");
    one(&b, second, "b");
    Shards::open(&[a.path().to_path_buf(), b.path().to_path_buf()]).unwrap();

    // A list overrides the names.
    let list = format!(r#"{{"weight_map":{{"a":"{first}"}}}}"#);
    fs::write(a.path().join("model.safetensors.index.json"), list).unwrap();
    Shards::open(&a.dirs()).unwrap();
}
