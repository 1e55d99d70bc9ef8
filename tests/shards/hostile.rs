//! Refuses invalid shards, with either engine: the error names the file, the tensor and the flaw.

use colibri_ring::EngineKind;
use colibri_ring::headers::HeaderError;
use colibri_uring::shards::{Dtype, Flaw, MAX_HEADER, ShardError, Shards};

use crate::files::{Dir, entry};

/// The error of a directory, which is the same with either engine.
fn refusal(dir: &Dir) -> ShardError {
    let open = |engine| Shards::open_with(&dir.dirs(), &[], engine).unwrap_err();
    let (ring, pread) = (open(EngineKind::Auto), open(EngineKind::Pread));
    assert_eq!(ring.to_string(), pread.to_string());
    assert_eq!(ring.to_string().lines().count(), 1);
    ring
}

/// The flaw of tensor `tensor` in a shard of these entries with `data` bytes of data.
#[track_caller]
fn flaw_of(tensor: &str, entries: &[String], data: usize) -> Flaw {
    let dir = Dir::new();
    dir.shard("bad.safetensors", entries, &vec![0; data]);
    let error = refusal(&dir);
    let text = error.to_string();
    assert!(text.contains("bad.safetensors"), "{text}");
    assert!(text.contains(tensor), "{text}");
    match error {
        ShardError::Tensor {
            file,
            tensor: named,
            flaw,
        } => {
            assert_eq!(file, dir.path().join("bad.safetensors"));
            assert_eq!(named, tensor);
            flaw
        }
        other => panic!("{other:?}"),
    }
}

/// The tensor at which a header's text is malformed, and the reason.
#[track_caller]
fn malformed(header: impl AsRef<[u8]>) -> (Option<String>, String) {
    let dir = Dir::new();
    dir.shard_of("bad.safetensors", header, &[]);
    match refusal(&dir) {
        ShardError::Json {
            file,
            tensor,
            reason,
        } => {
            assert!(file.ends_with("bad.safetensors"));
            (tensor, reason)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_same_name_in_two_shards() {
    let dir = Dir::new();
    dir.shard("a.safetensors", &[entry("t", "U8", &[2], 0, 2)], &[0; 2]);
    dir.shard("b.safetensors", &[entry("t", "F32", &[1], 0, 4)], &[0; 4]);
    let text = refusal(&dir).to_string();
    for part in ["tensor t is in both", "a.safetensors", "b.safetensors"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_same_name_in_two_directories() {
    let (one, two) = (Dir::new(), Dir::new());
    for dir in [&one, &two] {
        dir.shard("a.safetensors", &[entry("t", "U8", &[2], 0, 2)], &[0; 2]);
    }
    let dirs = [one.path().to_path_buf(), two.path().to_path_buf()];
    match Shards::open(&dirs).unwrap_err() {
        ShardError::InTwoShards {
            tensor,
            first,
            second,
        } => {
            assert_eq!(tensor, "t");
            assert_eq!(first, one.path().join("a.safetensors"));
            assert_eq!(second, two.path().join("a.safetensors"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_same_name_twice_in_one_shard() {
    let apart = [
        entry("t", "U8", &[2], 0, 2),
        entry("u", "U8", &[1], 2, 3),
        entry("t", "U8", &[2], 3, 5),
    ];
    assert_eq!(flaw_of("t", &apart, 5), Flaw::Twice);
    let together = [entry("t", "U8", &[2], 0, 2), entry("t", "U8", &[2], 0, 2)];
    assert_eq!(flaw_of("t", &together, 2), Flaw::Twice);
    // Escapes are another spelling of the same name.
    let escaped = [
        entry("t", "U8", &[2], 0, 2),
        entry(r"\u0074", "U8", &[2], 2, 4),
    ];
    assert_eq!(flaw_of("t", &escaped, 4), Flaw::Twice);
}

#[test]
fn offsets_outside_the_file() {
    let far = 1 << 40;
    let outside = Flaw::BeyondFile {
        start: far,
        end: far + 4,
        data: 4,
    };
    let entries = [
        entry("in", "U8", &[4], 0, 4),
        entry("out", "U8", &[4], far, far + 4),
    ];
    assert_eq!(flaw_of("out", &entries, 4), outside);
    let last = u64::MAX;
    let empty = [entry("out", "U8", &[0], last, last)];
    assert!(matches!(
        flaw_of("out", &empty, 0),
        Flaw::BeyondFile { end: u64::MAX, .. }
    ));
}

#[test]
fn reversed_offsets() {
    let entries = [entry("t", "U8", &[4], 8, 4)];
    let want = Flaw::Reversed { start: 8, end: 4 };
    assert_eq!(flaw_of("t", &entries, 8), want);
}

#[test]
fn data_that_ends_before_the_file_does() {
    let entries = [entry("a", "U8", &[4], 0, 4), entry("b", "U8", &[1], 4, 5)];
    let want = Flaw::FileGoesOn { end: 5, data: 6 };
    assert_eq!(flaw_of("b", &entries, 6), want);
}

#[test]
fn data_without_a_tensor() {
    let dir = Dir::new();
    dir.shard("bad.safetensors", &[], &[0; 3]);
    let error = refusal(&dir);
    assert!(matches!(error, ShardError::NoTensors { bytes: 3, .. }));
    assert!(error.to_string().contains("bad.safetensors"));
}

#[test]
fn a_truncated_file() {
    let entries = [entry("a", "U8", &[4], 0, 4), entry("b", "F32", &[2], 4, 12)];
    let want = Flaw::BeyondFile {
        start: 4,
        end: 12,
        data: 11,
    };
    assert_eq!(flaw_of("b", &entries, 11), want);
}

#[test]
fn a_file_cut_off_inside_its_header() {
    let dir = Dir::new();
    let header = format!("{{{}}}", entry("t", "U8", &[2], 0, 2));
    let len = header.len() as u64;
    dir.shard_claiming("bad.safetensors", len, &header.as_bytes()[..20], &[]);
    match refusal(&dir) {
        ShardError::Header(HeaderError::BeyondFile { path, len: l, left }) => {
            assert!(path.ends_with("bad.safetensors"));
            assert_eq!((l, left), (len, 20));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_too_short_for_a_length() {
    for size in [0, 1, 7] {
        let dir = Dir::new();
        std::fs::write(dir.path().join("bad.safetensors"), vec![1; size]).unwrap();
        let error = refusal(&dir);
        assert!(error.to_string().contains("bad.safetensors"));
        assert!(matches!(
            error,
            ShardError::Header(HeaderError::TooShort { .. })
        ));
    }
}

#[test]
fn a_header_that_lies_about_its_length() {
    let header = format!("{{{}}}", entry("t", "U8", &[2], 0, 2));
    let real = header.len() as u64;
    for claimed in [u64::MAX, u64::MAX - 7, 1 << 63, real + 3] {
        let dir = Dir::new();
        dir.shard_claiming("bad.safetensors", claimed, header.as_bytes(), &[0; 2]);
        let error = refusal(&dir);
        assert!(error.to_string().contains(&claimed.to_string()));
        assert!(matches!(
            error,
            ShardError::Header(HeaderError::BeyondFile { .. })
        ));
    }
    // Too long and too short by a little: the text no longer ends where it should.
    for claimed in [real + 1, real - 1, 1, 0] {
        let dir = Dir::new();
        dir.shard_claiming("bad.safetensors", claimed, header.as_bytes(), &[0; 2]);
        assert!(matches!(refusal(&dir), ShardError::Json { .. }));
    }
}

#[test]
fn a_header_over_the_cap() {
    let dir = Dir::new();
    let path = dir.path().join("bad.safetensors");
    std::fs::write(&path, (MAX_HEADER + 1).to_le_bytes()).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(MAX_HEADER + 100).unwrap();
    let error = refusal(&dir);
    assert!(error.to_string().contains("bad.safetensors"));
    assert!(matches!(
        error,
        ShardError::Header(HeaderError::OverCap {
            cap: MAX_HEADER,
            ..
        })
    ));
}

#[test]
fn an_unknown_dtype() {
    let entries = [
        entry("good", "U8", &[2], 0, 2),
        entry("odd", "F3_E1M1", &[2], 2, 4),
    ];
    let want = Flaw::UnknownDtype("F3_E1M1".into());
    assert_eq!(flaw_of("odd", &entries, 4), want);
}

#[test]
fn shapes_that_overflow() {
    for shape in [
        &[u64::MAX, 2][..],
        &[1 << 32, 1 << 32],
        &[1 << 32, 1 << 32, 0],
        &[u64::MAX / 8],
    ] {
        let flaw = flaw_of("t", &[entry("t", "F32", shape, 0, 4)], 4);
        assert!(matches!(flaw, Flaw::ShapeOverflow { .. }), "{flaw:?}");
    }
}

#[test]
fn a_size_that_does_not_match_the_shape() {
    let flaw = flaw_of("t", &[entry("t", "BF16", &[3, 2], 0, 10)], 10);
    let want = Flaw::Size {
        shape: vec![3, 2],
        dtype: Dtype::Bf16,
        want: 12,
        have: 10,
    };
    assert_eq!(flaw, want);
}

#[test]
fn elements_that_do_not_fill_bytes() {
    let flaw = flaw_of("t", &[entry("t", "F4", &[3], 0, 2)], 2);
    assert!(matches!(flaw, Flaw::PartialByte { .. }), "{flaw:?}");
}

#[test]
fn tensors_that_overlap() {
    let entries = [entry("a", "U8", &[4], 0, 4), entry("b", "U8", &[4], 2, 6)];
    assert_eq!(flaw_of("b", &entries, 6), Flaw::Overlap("a".into()));
    let inside = [entry("a", "U8", &[4], 0, 4), entry("e", "U8", &[0], 2, 2)];
    assert_eq!(flaw_of("e", &inside, 4), Flaw::Overlap("a".into()));
}

#[test]
fn bytes_between_tensors() {
    let entries = [entry("a", "U8", &[4], 0, 4), entry("b", "U8", &[2], 6, 8)];
    let want = Flaw::Hole { from: 4, start: 6 };
    assert_eq!(flaw_of("b", &entries, 8), want);
    let first = [entry("a", "U8", &[4], 1, 5)];
    let want = Flaw::Hole { from: 0, start: 1 };
    assert_eq!(flaw_of("a", &first, 5), want);
}

#[test]
fn fields_that_are_missing_or_of_the_wrong_kind() {
    let (dtype, shape, offsets) = (
        r#""dtype":"U8""#,
        r#""shape":[]"#,
        r#""data_offsets":[0,1]"#,
    );
    for (fields, missing) in [
        ([shape, offsets], "dtype"),
        ([dtype, offsets], "shape"),
        ([dtype, shape], "data_offsets"),
    ] {
        let entry = format!(r#""t":{{{}}}"#, fields.join(","));
        assert_eq!(flaw_of("t", &[entry], 1), Flaw::NoField(missing));
    }
    for bad in [
        r#"{"t":5}"#,
        r#"{"t":null}"#,
        r#"{"t":{"dtype":8,"shape":[],"data_offsets":[0,1]}}"#,
        r#"{"t":{"dtype":"U8","shape":3,"data_offsets":[0,1]}}"#,
        r#"{"t":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#,
        r#"{"t":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}"#,
        r#"{"t":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}"#,
        r#"{"t":{"dtype":"U8","shape":[],"data_offsets":[0]}}"#,
        r#"{"t":{"dtype":"U8","shape":[],"data_offsets":[0,1,2]}}"#,
        r#"{"t":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}}"#,
    ] {
        assert_eq!(malformed(bad).0.as_deref(), Some("t"), "{bad}");
    }
}

#[test]
fn text_that_is_not_a_header() {
    for bad in [
        "",
        "nonsense",
        "[]",
        "{",
        r#"{"t""#,
        "{} {}",
        r#"{"__metadata__":{"a":1}}"#,
    ] {
        malformed(bad);
    }
    let twice = malformed(r#"{"__metadata__":{},"__metadata__":{}}"#);
    assert!(twice.1.contains("twice"));
}

#[test]
fn a_header_that_is_not_utf8() {
    let dir = Dir::new();
    dir.shard_of("bad.safetensors", b"{\"\xff\":1}", &[]);
    let error = refusal(&dir);
    assert!(error.to_string().contains("bad.safetensors"));
    assert!(matches!(error, ShardError::Utf8 { valid: 2, .. }));
}

#[test]
fn nesting_does_not_overflow_the_stack() {
    for open in ["[", r#"{"a":"#] {
        let deep = open.repeat(1_000_000);
        malformed(&deep);
        malformed(format!(r#"{{"t":{deep}"#));
        malformed(format!(r#"{{"t":{{"other":{deep}"#));
        malformed(format!(r#"{{"t":{{"shape":{deep}"#));
        malformed(format!(r#"{{"__metadata__":{deep}"#));
    }
}

#[test]
fn messages_stay_on_one_line() {
    let name = format!(r"\n\u001b[2J{}", "x".repeat(10_000));
    let dir = Dir::new();
    dir.shard("bad.safetensors", &[entry(&name, "ODD", &[], 0, 1)], &[0]);
    let text = refusal(&dir).to_string();
    assert!(!text.contains(['\n', '\u{1b}']));
    assert!(text.len() < 1000);
}
