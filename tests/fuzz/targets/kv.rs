//! Opens an edited KV file and continues its context. Built for fuzzing, the library takes every checksum for right.
#![no_main]

use std::cell::RefCell;

use colibri_fuzz::{ModelDir, edit};
use colibri_uring::{Fingerprint, KvFile, Logits, Model, Sampling, Sequence, Step, TextRunner};
use libfuzzer_sys::fuzz_target;

struct Kv {
    dir: ModelDir,
    fingerprint: Fingerprint,
    runner: TextRunner,
    whole: Vec<u8>,
}

impl Kv {
    fn new() -> Kv {
        let dir = ModelDir::copy_of("f32-smallest");
        let model = Model::open(dir.path(), &Default::default()).expect("the fixture");
        let fingerprint = model.fingerprint().expect("the fixture");
        let mut runner = model.runner(&Default::default()).expect("the fixture");
        let path = dir.file("kv");
        let mut file = KvFile::open(&path, fingerprint).expect("a new file");
        let mut sequence = runner.sequence();
        let mut ids = vec![1, 2, 3];
        for _ in 0..2 {
            let tokens = runner.generate(&mut sequence, &ids, &Sampling::greedy(), 3);
            ids = tokens.map(|token| token.expect("a token").id).collect();
            let history = sequence.ids().to_vec();
            file.append(&history, &sequence.kv(), b"note")
                .expect("to save");
        }
        let whole = dir.read("kv");
        Kv {
            dir,
            fingerprint,
            runner,
            whole,
        }
    }

    fn run(&mut self, data: &[u8]) {
        let mut bytes = self.whole.clone();
        edit(&mut bytes, data);
        self.dir.write("kv", &bytes);
        let path = self.dir.file("kv");
        let Ok(mut file) = KvFile::open(&path, self.fingerprint) else {
            return;
        };
        let mut sequence: Sequence = self.runner.sequence();
        if file
            .restore(&mut self.runner, &mut sequence, file.rows())
            .is_err()
        {
            return;
        }
        let mut steps = [Step {
            sequence: &mut sequence,
            ids: &[1],
            logits: Logits::Last,
        }];
        let _ = self.runner.forward(&mut steps);
        let history = sequence.ids().to_vec();
        let _ = file.append(&history, &sequence.kv(), b"");
    }
}

thread_local! {
    static KV: RefCell<Option<Kv>> = const { RefCell::new(None) };
}

fuzz_target!(|data: &[u8]| KV.with_borrow_mut(|kv| kv.get_or_insert_with(Kv::new).run(data)));
