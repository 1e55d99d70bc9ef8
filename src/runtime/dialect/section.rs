//! Reads calls in a section between special tokens: each has a head with the name, a separator, and JSON arguments.

use serde_json::{Map, Value};

use super::pairs::is_name;

/// The tokens of a family's calls, and how it writes head and body.
#[derive(Debug, PartialEq, Eq)]
pub struct Section {
    /// Begins the calls.
    pub open: &'static str,
    /// Begins a call.
    pub call: &'static str,
    /// Stands between head and body.
    pub separator: &'static str,
    /// Ends a call.
    pub called: &'static str,
    /// Ends the calls.
    pub close: &'static str,
    /// Where the name is.
    pub style: Style,
}

/// Where a call has its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// The head is the name.
    Name,
    /// The head is `functions.NAME:INDEX`.
    Numbered,
    /// The head is `function`; the body is the name, a line break, and the arguments in a fence.
    Fenced,
}

const DEEPSEEK: Section = Section {
    open: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    separator: "<｜tool▁sep｜>",
    called: "<｜tool▁call▁end｜>",
    close: "<｜tool▁calls▁end｜>",
    style: Style::Name,
};

/// DeepSeek V3 and R1.
const DEEPSEEK_V3: Section = Section {
    style: Style::Fenced,
    ..DEEPSEEK
};

/// DeepSeek V3.1.
const DEEPSEEK_V31: Section = DEEPSEEK;

/// Kimi K2.
const KIMI_K2: Section = Section {
    open: "<|tool_calls_section_begin|>",
    call: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    called: "<|tool_call_end|>",
    close: "<|tool_calls_section_end|>",
    style: Style::Numbered,
};

const FENCE: (&str, &str) = ("```json\n", "\n```");

/// Every known section.
pub const ALL: [&Section; 3] = [&DEEPSEEK_V3, &DEEPSEEK_V31, &KIMI_K2];

/// The section that a template writes.
pub fn of(template: &str) -> Option<&'static Section> {
    let fits = |section: &&Section| match section.style {
        Style::Name => !template.contains("```json"),
        Style::Fenced => template.contains("```json"),
        Style::Numbered => true,
    };
    let mut written = ALL
        .into_iter()
        .filter(|section| template.contains(section.open));
    written.find(fits)
}

impl Section {
    /// Name and arguments of the call that `text` is, without its first and last token; `None` if it is none.
    pub fn call(&self, text: &str) -> Option<(String, String)> {
        let (head, body) = text.split_once(self.separator)?;
        let (head, body) = (head.trim(), body.trim());
        let (name, arguments) = match self.style {
            Style::Name => (head, body),
            Style::Numbered => {
                let name = head.strip_prefix("functions.").unwrap_or(head);
                let (name, index) = name.rsplit_once(':').unwrap_or((name, ""));
                if !index.bytes().all(|b| b.is_ascii_digit()) {
                    return None;
                }
                (name, body)
            }
            Style::Fenced => {
                let (name, rest) = body.split_once('\n')?;
                let rest = rest.trim_start().strip_prefix(FENCE.0)?;
                (name.trim(), rest.strip_suffix(FENCE.1)?)
            }
        };
        let arguments: Map<String, Value> = match arguments.trim() {
            "" => Map::new(),
            text => serde_json::from_str(text).ok()?,
        };
        is_name(name).then(|| (name.to_owned(), Value::from(arguments).to_string()))
    }

    /// How a call of `name` is written: the head, whether a number ends it, and the texts around the arguments.
    pub fn frame(&self, name: &str) -> (String, bool, [String; 2]) {
        let bare = [String::new(), String::new()];
        match self.style {
            Style::Name => (name.into(), false, bare),
            Style::Numbered => (format!("functions.{name}:"), true, bare),
            Style::Fenced => {
                let around = [format!("{name}\n{}", FENCE.0), FENCE.1.into()];
                ("function".into(), false, around)
            }
        }
    }
}
