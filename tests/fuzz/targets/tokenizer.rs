//! Reads `tokenizer_config.json` (first byte even) or `tokenizer.json` (odd), and encodes and decodes a text.
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::OneOfTwo;
use colibri_uring::Tokenizer;
use colibri_uring::runtime::template::ChatTemplate;
use libfuzzer_sys::{Corpus, fuzz_target};

thread_local! {
    static FILES: LazyCell<OneOfTwo> = LazyCell::new(|| OneOfTwo::new("tiny-text", ["tokenizer_config.json", "tokenizer.json"]));
}

fuzz_target!(|data: &[u8]| -> Corpus {
    FILES.with(|files| {
        let Some(dir) = files.write(data) else {
            return Corpus::Reject;
        };
        let _ = ChatTemplate::load(dir.path());
        let Ok(Some(tokenizer)) = Tokenizer::load(dir.path()) else {
            return Corpus::Keep;
        };
        if let Ok(ids) = tokenizer.encode("The hummingbird <|user|> \u{1f426} hovers.\n") {
            let _ = tokenizer.decode(&ids);
        }
        Corpus::Keep
    })
});
