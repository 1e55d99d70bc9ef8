//! Renders a chat template.
#![no_main]

use std::cell::LazyCell;

use colibri_fuzz::ModelDir;
use colibri_uring::runtime::template::{ChatTemplate, Message, Role};
use libfuzzer_sys::fuzz_target;

thread_local! {
    static DIR: LazyCell<ModelDir> = LazyCell::new(|| ModelDir::copy_of("chat"));
}

fuzz_target!(|data: &[u8]| DIR.with(|dir| {
    dir.write("chat_template.jinja", data);
    let Ok(template) = ChatTemplate::load(dir.path()) else {
        return;
    };
    let messages = [
        Message::new(Role::System, "Be brief."),
        Message::new(Role::User, "What is <|endoftext|>, and why? /nothink"),
        Message::new(Role::Assistant, "<think>It is a token.</think>A token."),
        Message::new(Role::User, "\u{1f426}"),
    ];
    let _ = template.render(&messages);
}));
