//! Reads `tokenizer_config.json` (first byte even) or `tokenizer.json` (odd), and encodes and decodes a text.
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::ModelDir;
use colibri_uring::Tokenizer;
use colibri_uring::runtime::template::ChatTemplate;
use libfuzzer_sys::{Corpus, fuzz_target};

thread_local! {
    static DIR: LazyCell<(ModelDir, Vec<u8>, Vec<u8>)> = LazyCell::new(|| {
        let dir = ModelDir::copy_of("tiny-text");
        let (settings, tokenizer) = (dir.read("tokenizer_config.json"), dir.read("tokenizer.json"));
        (dir, settings, tokenizer)
    });
}

fuzz_target!(|data: &[u8]| -> Corpus {
    let Some((which, data)) = data.split_first() else {
        return Corpus::Reject;
    };
    DIR.with(|dir| {
        let (dir, settings, tokenizer) = &**dir;
        let changed = which % 2 == 0;
        dir.write(
            "tokenizer_config.json",
            if changed { data } else { settings },
        );
        dir.write("tokenizer.json", if changed { tokenizer } else { data });
        let _ = ChatTemplate::load(dir.path());
        let Ok(Some(tokenizer)) = Tokenizer::load(dir.path()) else {
            return;
        };
        if let Ok(ids) = tokenizer.encode("The hummingbird <|user|> \u{1f426} hovers.\n") {
            let _ = tokenizer.decode(&ids);
        }
    });
    Corpus::Keep
});
