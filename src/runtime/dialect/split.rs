//! Follows an answer from tag to tag. Text that may be the beginning of a tag is held back.

use super::pairs::{Found, Pairs};
use super::{CallFormat, Part, Section, Tool, beginning, json};

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";

#[derive(Debug)]
enum State {
    /// White space so far: the reasoning may begin.
    Start,
    Reasoning,
    Content,
    JsonCall,
    PairsCall(Pairs),
    /// Between the calls of a section.
    Section(&'static Section),
    SectionCall(&'static Section),
}

/// Splits one answer.
#[derive(Debug)]
pub struct Splitter {
    state: State,
    calls: Option<CallFormat>,
    tools: Vec<Tool>,
    /// Text that belongs to no part yet.
    held: String,
    /// White space that belongs to a text if more of it follows.
    space: String,
    /// Whether the text has begun.
    begun: bool,
    /// Calls so far.
    count: usize,
    parts: Vec<Part>,
    /// Bytes of the answer so far.
    pushed: usize,
    reasoned: usize,
}

impl Splitter {
    pub(super) fn new(
        thinks: bool,
        opened: bool,
        calls: Option<CallFormat>,
        tools: Vec<Tool>,
    ) -> Splitter {
        Splitter {
            state: match (thinks, opened) {
                (_, true) => State::Reasoning,
                (true, false) => State::Start,
                (false, false) => State::Content,
            },
            calls,
            tools,
            held: String::new(),
            space: String::new(),
            begun: false,
            count: 0,
            parts: Vec::new(),
            pushed: 0,
            reasoned: 0,
        }
    }

    /// Tool calls so far.
    pub fn calls(&self) -> usize {
        self.count
    }

    /// Bytes of the answer up to the end of its reasoning, with the tags.
    pub fn reasoned(&self) -> usize {
        self.reasoned
    }

    /// The parts that the next piece of the answer completes.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.held.push_str(piece);
        self.pushed += piece.len();
        while self.step(false) {}
        std::mem::take(&mut self.parts)
    }

    /// What was held back, at the end of the answer. The arguments of an unfinished call stay unfinished.
    pub fn finish(mut self) -> Vec<Part> {
        while self.step(true) {}
        self.parts
    }

    /// Takes one element off the held text; false if more has to come first. `last` tells that nothing will.
    fn step(&mut self, last: bool) -> bool {
        match &mut self.state {
            State::Start => self.start(last),
            State::Reasoning => self.text(Some(THOUGHT), last),
            State::Content => self.text(self.calls.map(tag_of), last),
            State::JsonCall => self.json_call(last),
            State::PairsCall(_) => self.pairs_call(last),
            State::Section(section) => {
                let section = *section;
                self.section(section, last)
            }
            State::SectionCall(section) => {
                let section = *section;
                self.section_call(section, last)
            }
        }
    }

    fn start(&mut self, last: bool) -> bool {
        let rest = self.held.trim_start();
        if let Some(rest) = rest.strip_prefix(THINK) {
            self.held = rest.to_owned();
            self.state = State::Reasoning;
        } else if last || !THINK.starts_with(rest) {
            self.state = State::Content;
        } else {
            return false;
        }
        true
    }

    /// Passes on text up to the tag that ends it.
    fn text(&mut self, tag: Option<&str>, last: bool) -> bool {
        let found = tag.and_then(|tag| self.held.find(tag));
        let end = match (found, tag) {
            (Some(end), _) => end,
            (None, Some(tag)) if !last => self.held.len() - beginning(&self.held, tag),
            (None, _) => self.held.len(),
        };
        let text: String = self.held.drain(..end).collect();
        self.emit(&text);
        let (Some(tag), Some(_)) = (tag, found) else {
            return false;
        };
        self.held.drain(..tag.len());
        self.state = match self.calls {
            _ if tag == THOUGHT => State::Content,
            Some(CallFormat::Pairs) => State::PairsCall(Pairs::default()),
            Some(CallFormat::Section(section)) => State::Section(section),
            _ => State::JsonCall,
        };
        if tag == THOUGHT {
            self.reasoned = self.pushed - self.held.len();
            self.end_text();
        }
        true
    }

    /// Adds to the text, whose white space at the beginning and at the end does not count.
    fn emit(&mut self, text: &str) {
        let text = match self.begun {
            true => text,
            false => text.trim_start(),
        };
        let body = text.trim_end();
        if !body.is_empty() {
            let body_text = std::mem::take(&mut self.space) + body;
            self.begun = true;
            self.parts.push(match self.state {
                State::Reasoning => Part::Reasoning(body_text),
                _ => Part::Content(body_text),
            });
        }
        self.space.push_str(&text[body.len()..]);
    }

    fn end_text(&mut self) {
        self.space.clear();
        self.begun = false;
    }

    fn json_call(&mut self, last: bool) -> bool {
        let Some(end) = self.held.find(CALLED) else {
            return last && self.no_call(self.held.len());
        };
        let Some((name, arguments)) = json::call(&self.held[..end]) else {
            return self.no_call(end + CALLED.len());
        };
        self.begin_call(name);
        self.arguments(arguments);
        self.end_call(end + CALLED.len())
    }

    fn pairs_call(&mut self, last: bool) -> bool {
        let State::PairsCall(pairs) = &mut self.state else {
            return false;
        };
        let end = self.held.find(CALLED);
        let text = &self.held[..end.unwrap_or(self.held.len())];
        let (found, taken) = pairs.step(text, end.is_some(), &self.tools);
        let (named, rest) = (pairs.is_named(), pairs.end());
        match (found, end) {
            (Found::Name(name), _) => self.begin_call(name),
            (Found::Arguments(text), _) => self.arguments(text),
            (Found::Nothing | Found::Other, Some(end)) if named => {
                self.arguments(rest.to_owned());
                return self.end_call(end + CALLED.len());
            }
            // The client knows of the call: what is unreadable in it is left out.
            (Found::Other, None) if named => return false,
            (Found::Nothing, None) if named || !last => return false,
            (Found::Nothing, _) => return self.no_call(self.held.len()),
            (Found::Other, _) => return self.no_call(0),
        }
        self.held.drain(..taken);
        true
    }

    /// Takes the beginning of the next call, or the end of the section. Other text ends it, too.
    fn section(&mut self, section: &'static Section, last: bool) -> bool {
        let rest = self.held.trim_start();
        if let Some(rest) = rest.strip_prefix(section.call) {
            self.held = rest.to_owned();
            self.state = State::SectionCall(section);
        } else if let Some(rest) = rest.strip_prefix(section.close) {
            self.held = rest.to_owned();
            self.state = State::Content;
        } else if last
            || ![section.call, section.close]
                .iter()
                .any(|tag| tag.starts_with(rest))
        {
            self.state = State::Content;
        } else {
            return false;
        }
        true
    }

    fn section_call(&mut self, section: &'static Section, last: bool) -> bool {
        let Some(end) = self.held.find(section.called) else {
            return last && self.not_called(section.call, self.held.len());
        };
        let taken = end + section.called.len();
        let Some((name, arguments)) = section.call(&self.held[..end]) else {
            return self.not_called(section.call, taken);
        };
        self.begin_call(name);
        self.arguments(arguments);
        self.held.drain(..taken);
        self.state = State::Section(section);
        true
    }

    fn begin_call(&mut self, name: String) {
        let index = self.count;
        self.count += 1;
        self.end_text();
        self.parts.push(Part::Call { index, name });
    }

    fn arguments(&mut self, text: String) {
        let index = self.count - 1;
        if !text.is_empty() {
            self.parts.push(Part::Arguments { index, text });
        }
    }

    fn end_call(&mut self, end: usize) -> bool {
        self.held.drain(..end);
        self.state = State::Content;
        true
    }

    /// What looked like a call is content: its tag, and the next `end` bytes.
    fn no_call(&mut self, end: usize) -> bool {
        self.not_called(CALL, end)
    }

    /// As [`Splitter::no_call`], of a call that began with `tag`.
    fn not_called(&mut self, tag: &str, end: usize) -> bool {
        self.state = State::Content;
        let rest: String = self.held.drain(..end).collect();
        self.emit(&(tag.to_owned() + &rest));
        true
    }
}

/// The tag that calls begin with.
fn tag_of(format: CallFormat) -> &'static str {
    match format {
        CallFormat::Pairs | CallFormat::Json => CALL,
        CallFormat::Section(section) => section.open,
    }
}
