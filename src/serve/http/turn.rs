//! Follows one answer of a conversation: splits it, and remembers it for the next message.

use super::answer::Spelled;
use super::fields::random;
use super::prepare::Prepared;
use super::said;
use super::served::Served;
use crate::runtime::dialect::{Part, Splitter};

/// A tool call.
#[derive(Clone, Debug)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// JSON text.
    pub arguments: String,
}

/// An answer in the making.
#[derive(Debug)]
pub struct Turn {
    prompt: String,
    prompt_ids: Vec<u32>,
    /// Whether only the first call counts.
    single: bool,
    splitter: Option<Splitter>,
    /// Parts that are not out.
    parts: Vec<Part>,
    calls: Vec<Call>,
    /// Calls that the model wrote.
    written: usize,
    /// All of the text.
    raw: String,
    ids: Vec<u32>,
}

impl Turn {
    pub fn new(served: &Served, prepared: &Prepared) -> Turn {
        Turn {
            prompt: prepared.prompt.clone(),
            prompt_ids: prepared.ids.clone(),
            single: prepared.single,
            splitter: Some(prepared.splitter(served)),
            parts: Vec::new(),
            calls: Vec::new(),
            written: 0,
            raw: String::new(),
            ids: Vec::new(),
        }
    }

    pub fn push(&mut self, text: &str, tokens: &[Spelled]) {
        self.raw += text;
        self.ids.extend(tokens.iter().map(|token| token.drawn.id));
        let parts = self.splitter.as_mut().map(|splitter| splitter.push(text));
        self.absorb(parts.unwrap_or_default());
    }

    fn absorb(&mut self, parts: Vec<Part>) {
        for part in parts {
            self.written += usize::from(matches!(part, Part::Call { .. }));
            match &part {
                Part::Call { index, .. } | Part::Arguments { index, .. }
                    if self.single && *index > 0 =>
                {
                    continue;
                }
                Part::Call { name, .. } => self.calls.push(Call {
                    id: format!("call_{:016x}", random()),
                    name: name.clone(),
                    arguments: String::new(),
                }),
                Part::Arguments { index, text } => self.calls[*index].arguments += text,
                Part::Reasoning(_) | Part::Content(_) => {}
            }
            self.parts.push(part);
        }
    }

    /// Takes what has come since the last call.
    pub fn take(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }

    /// The calls so far.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// All ids.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// At the end of the answer: adds what was held back, and remembers the answer.
    pub fn end(&mut self, served: &Served) {
        let Some(splitter) = self.splitter.take() else {
            return;
        };
        let reasoned = splitter.reasoned();
        self.absorb(splitter.finish());
        served.remember(&self.prompt, &self.prompt_ids, &self.raw, &self.ids);
        let calls = self.calls.iter().map(|call| {
            let arguments = serde_json::from_str(&call.arguments).ok()?;
            Some(said::call(Some(&call.id), &call.name, arguments))
        });
        match calls.collect::<Option<Vec<_>>>() {
            // What the client does not know of would come back with it.
            Some(calls) if !calls.is_empty() && self.written == calls.len() => {
                served.remember_calls(calls, &self.raw[reasoned..]);
            }
            _ => {}
        }
    }
}
