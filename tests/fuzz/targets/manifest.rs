//! Resumes a conversion from an edited manifest. Neither the source nor a file outside of the output may change.
#![no_main]

use std::cell::LazyCell;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use colibri_fuzz::{ModelDir, edit};
use colibri_uring::pool::Pool;
use colibri_uring::tools::convert::{Conversion, Options, Recipe};
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

struct Run {
    source: ModelDir,
    before: Vec<u8>,
    /// The manifest of a conversion that was stopped at once.
    whole: Vec<u8>,
    /// The conversion writes into a directory in it.
    place: TempDir,
    pool: Pool,
}

const MANIFEST: &str = ".convert.json";

impl Run {
    fn new() -> Run {
        let source = ModelDir::copy_of("f32-smallest");
        let mut run = Run {
            before: source.read("model.safetensors"),
            whole: Vec::new(),
            source,
            place: tempfile::tempdir().expect("a temporary directory"),
            pool: Pool::new(1),
        };
        run.convert(true);
        run.whole = fs::read(run.out().join(MANIFEST)).expect("a manifest");
        run
    }

    fn out(&self) -> PathBuf {
        self.place.path().join("out")
    }

    fn convert(&self, stop: bool) {
        let options = Options {
            sources: vec![self.source.path().into()],
            out: self.out(),
            recipe: Recipe {
                experts: None,
                dense: None,
                embed: None,
                mtp: None,
            },
            shard_size: 1 << 20,
            delete_source: false,
        };
        if let Ok(conversion) = Conversion::plan(options) {
            let _ = conversion.run(&self.pool, &AtomicBool::new(stop), &|_| ());
        }
    }

    fn run(&self, data: &[u8]) {
        let out = self.out();
        fs::remove_dir_all(&out).expect("to remove the output");
        fs::create_dir(&out).expect("to make a directory");
        let mut manifest = self.whole.clone();
        edit(&mut manifest, data);
        fs::write(out.join(MANIFEST), manifest).expect("to write the manifest");
        self.convert(false);
        assert_eq!(self.source.read("model.safetensors"), self.before);
        assert_eq!(
            fs::read_dir(self.place.path()).expect("the place").count(),
            1
        );
    }
}

thread_local! {
    static RUN: LazyCell<Run> = LazyCell::new(Run::new);
}

fuzz_target!(|data: &[u8]| RUN.with(|run| run.run(data)));
