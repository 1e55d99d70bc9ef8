use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use super::*;
use crate::arch::Architecture;

fn is_whole(dir: &Path) -> bool {
    (FILES.iter()).all(|file| fs::read(dir.join(file.name)).is_ok_and(|found| found == file.bytes))
}

fn unpacked() -> (TempDir, Demo) {
    let cache = tempfile::tempdir().unwrap();
    let demo = Demo::open_in(Ok(cache.path().join("not/there/yet")), &|_| {}).unwrap();
    (cache, demo)
}

fn again(cache: &TempDir) -> Demo {
    Demo::open_in(Ok(cache.path().join("not/there/yet")), &|_| {}).unwrap()
}

#[test]
fn the_sums_are_those_of_the_files() {
    for file in FILES {
        let sum = hex(&Sha256::digest(file.bytes));
        assert_eq!(sum_of(file.name), Some(&*sum), "{}", file.name);
    }
    assert_eq!(SUMS.lines().count(), FILES.len());
    let size: usize = FILES.iter().map(|file| file.bytes.len()).sum();
    assert!(size <= 12_000_000, "{size} bytes");
}

#[test]
fn it_is_the_true_architecture() {
    let (_cache, demo) = unpacked();
    let config = Architecture::load(demo.dir()).unwrap();
    assert!(config.experts.count >= 16 && config.num_hidden_layers() >= 4);
    let text = fs::read(demo.dir().join("config.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let context = json["max_position_embeddings"].as_u64().unwrap();
    assert!((config.indexer.unwrap().top_k as u64) < context);
    assert_eq!(json["num_nextn_predict_layers"], 1);
}

#[test]
fn damage_is_put_right_and_what_is_whole_stays() {
    let (cache, demo) = unpacked();
    assert!(is_whole(demo.dir()));
    let path = |name: &str| demo.dir().join(name);
    let inode = |name: &str| fs::metadata(path(name)).unwrap().ino();
    let tokenizer = inode("tokenizer.json");
    // One bit, a missing end, a file too many bytes, nothing at all, and a directory that has become a file.
    let mut bytes = fs::read(path("model.safetensors")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path("model.safetensors"), &bytes).unwrap();
    let config = fs::read(path("config.json")).unwrap();
    fs::write(path("config.json"), &config[..config.len() - 1]).unwrap();
    fs::remove_file(path("generation_config.json")).unwrap();
    fs::write(path(".coli_usage"), "kept").unwrap();
    assert_eq!(again(&cache).dir(), demo.dir());
    assert!(is_whole(demo.dir()));
    assert_eq!(inode("tokenizer.json"), tokenizer);
    assert_eq!(fs::read(path(".coli_usage")).unwrap(), b"kept");
    fs::remove_dir_all(demo.dir()).unwrap();
    fs::write(demo.dir(), "no directory").unwrap();
    assert_eq!(again(&cache).dir(), demo.dir());
    assert!(is_whole(demo.dir()));
    let left = fs::read_dir(demo.dir().parent().unwrap()).unwrap();
    assert_eq!(left.count(), 1);
}

#[test]
fn links_are_replaced_and_not_followed() {
    let (cache, demo) = unpacked();
    let other = cache.path().join("precious");
    fs::write(&other, "precious").unwrap();
    let config = demo.dir().join("config.json");
    fs::remove_file(&config).unwrap();
    symlink(&other, &config).unwrap();
    again(&cache);
    assert!(is_whole(demo.dir()));
    assert!(fs::symlink_metadata(&config).unwrap().is_file());
    let elsewhere = cache.path().join("elsewhere");
    fs::rename(demo.dir(), &elsewhere).unwrap();
    fs::remove_file(elsewhere.join("config.json")).unwrap();
    symlink(&elsewhere, demo.dir()).unwrap();
    again(&cache);
    assert!(is_whole(demo.dir()));
    assert!(!elsewhere.join("config.json").exists());
    assert_eq!(fs::read(&other).unwrap(), b"precious");
}

#[test]
fn without_a_cache_it_is_temporary() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for cache in [Err("of a test"), Ok(file.path().to_owned())] {
        let demo = Demo::open_in(cache, &|_| {}).unwrap();
        let dir = demo.dir().to_owned();
        assert!(is_whole(&dir));
        drop(demo);
        assert!(!dir.exists());
    }
}

#[test]
fn many_at_once_all_get_it() {
    let cache = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let demo = again(&cache);
                assert!(is_whole(demo.dir()) && demo._temporary.is_none());
            });
        }
    });
}
