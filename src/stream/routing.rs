//! What routers said, kept in a file: real routing for the simulation and for comparing caches.
//!
//! JSON lines. The first is [`Header`], each other an [`Event`] in the order in which the model met them.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Write};

use serde::{Deserialize, Serialize};

/// Which model it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format: [`VERSION`].
    pub routing: u32,
    /// Experts that a token uses in a layer.
    pub top_k: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Layers of the model.
    pub layers: usize,
}

/// The version that is written and read.
pub const VERSION: u32 = 1;

/// What a router said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// An early look at the router of a layer.
    Look {
        /// Index of the layer in the model.
        layer: usize,
        /// The likeliest experts for each token.
        ranks: usize,
        /// [tokens, ranks], each token's likeliest first.
        experts: Vec<u32>,
    },
    /// The decision of the router of a layer.
    Routed {
        /// Index of the layer in the model.
        layer: usize,
        /// [tokens, top_k].
        experts: Vec<u32>,
    },
    /// The experts of the layer have been computed.
    Computed {
        /// Index of the layer in the model.
        layer: usize,
    },
    /// How long the arithmetic of tokens took that were computed one at a time, without the waiting.
    Measured {
        /// Their number.
        tokens: u64,
        /// Seconds by phase, for all of them together.
        seconds: BTreeMap<String, f64>,
    },
}

/// Writes events. An error is kept for the end: what is computed does not depend on it.
pub struct Recorder {
    out: Box<dyn Write + Send>,
    failed: Option<io::Error>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}

impl Recorder {
    /// A recorder that has written the header.
    pub fn new(out: Box<dyn Write + Send>, header: &Header) -> Recorder {
        let mut recorder = Recorder { out, failed: None };
        recorder.line(header);
        recorder
    }

    /// Writes an event.
    pub fn event(&mut self, event: &Event) {
        self.line(event);
    }

    fn line(&mut self, value: &impl Serialize) {
        if self.failed.is_none() {
            let line = serde_json::to_writer(&mut self.out, value).map_err(io::Error::from);
            self.failed = line.and_then(|()| self.out.write_all(b"\n")).err();
        }
    }

    /// Ends the file.
    ///
    /// # Errors
    /// The first error of any write.
    pub fn finish(mut self) -> io::Result<()> {
        match self.failed.take() {
            Some(e) => Err(e),
            None => self.out.flush(),
        }
    }
}

/// More than a line has of any prompt that fits into memory.
const MAX_LINE: u64 = 64 << 20;

/// Why a file is no routing of a model.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A line is not what it should be.
    #[error("line {line}: {source}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A line names what the model does not have.
    #[error("line {line}: {what}")]
    Impossible {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// It has no line.
    #[error("it is empty")]
    Empty,
}

/// Reads what [`Recorder`] wrote. Layers and experts are those of the header, and lists are as long as they should be.
///
/// # Errors
/// [`RoutingError`] naming the line.
pub fn read(mut from: impl BufRead) -> Result<(Header, Vec<Event>), RoutingError> {
    let mut line = 0;
    let mut next = || {
        let mut text = Vec::new();
        line += 1;
        let read = (&mut from)
            .take(MAX_LINE + 1)
            .read_until(b'\n', &mut text)?;
        if read as u64 > MAX_LINE {
            let what = format!("it is longer than {MAX_LINE} bytes");
            return Err(RoutingError::Impossible { line, what });
        }
        Ok((read > 0).then_some((line, text)))
    };
    let (line, text) = next()?.ok_or(RoutingError::Empty)?;
    let header: Header =
        serde_json::from_slice(&text).map_err(|source| RoutingError::Line { line, source })?;
    if header.routing != VERSION {
        let what = format!("version {} is not {VERSION}", header.routing);
        return Err(RoutingError::Impossible { line, what });
    }
    let mut events = Vec::new();
    while let Some((line, text)) = next()? {
        let event: Event =
            serde_json::from_slice(&text).map_err(|source| RoutingError::Line { line, source })?;
        if let Err(what) = check(&event, &header) {
            return Err(RoutingError::Impossible { line, what });
        }
        events.push(event);
    }
    Ok((header, events))
}

fn check(event: &Event, header: &Header) -> Result<(), String> {
    let (layer, width, experts) = match event {
        Event::Look {
            layer,
            ranks,
            experts,
        } => (*layer, *ranks, &experts[..]),
        Event::Routed { layer, experts } => (*layer, header.top_k, &experts[..]),
        Event::Computed { layer } => (*layer, 1, &[0][..]),
        Event::Measured { seconds, .. } => {
            let bad = seconds.iter().find(|(_, s)| !(0.0..1e6).contains(*s));
            return match bad {
                Some((phase, s)) => Err(format!("{phase} took {s} seconds")),
                None => Ok(()),
            };
        }
    };
    if layer >= header.layers {
        return Err(format!("layer {layer} of {}", header.layers));
    }
    if width == 0 || experts.is_empty() || !experts.len().is_multiple_of(width) {
        return Err(format!("{} experts in groups of {width}", experts.len()));
    }
    match experts.iter().find(|id| **id as usize >= header.experts) {
        Some(id) => Err(format!("expert {id} of {}", header.experts)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r#"{"routing":1,"top_k":2,"experts":8,"layers":4}"#;

    #[test]
    fn what_is_written_is_read() {
        let header = serde_json::from_str(HEADER).unwrap();
        let events = [
            Event::Look {
                layer: 3,
                ranks: 3,
                experts: vec![1, 7, 0],
            },
            Event::Routed {
                layer: 3,
                experts: vec![1, 2, 5, 6],
            },
            Event::Computed { layer: 3 },
            Event::Measured {
                tokens: 2,
                seconds: [("head".to_owned(), 0.25)].into(),
            },
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut recorder = Recorder::new(Box::new(file.reopen().unwrap()), &header);
        events.iter().for_each(|event| recorder.event(event));
        recorder.finish().unwrap();
        let text = std::fs::read(file.path()).unwrap();
        assert_eq!(read(&text[..]).unwrap(), (header, events.to_vec()));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_line() {
        for (line, says) in [
            (
                r#"{"routed":{"layer":4,"experts":[1,2]}}"#,
                "line 2: layer 4 of 4",
            ),
            (
                r#"{"routed":{"layer":0,"experts":[1,8]}}"#,
                "line 2: expert 8 of 8",
            ),
            (
                r#"{"routed":{"layer":0,"experts":[1]}}"#,
                "line 2: 1 experts in groups of 2",
            ),
            (
                r#"{"look":{"layer":0,"ranks":0,"experts":[]}}"#,
                "groups of 0",
            ),
            (
                r#"{"measured":{"tokens":1,"seconds":{"head":-1}}}"#,
                "head took -1",
            ),
            (r#"{"computed":{"layer":9}}"#, "layer 9 of 4"),
            (r#"{"look":{"layer":0}}"#, "line 2: missing field"),
            ("", "line 2: EOF"),
        ] {
            let text = format!("{HEADER}\n{line}\n");
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert!(matches!(read(&b""[..]), Err(RoutingError::Empty)));
        let endless = std::io::BufReader::new(std::fs::File::open("/dev/zero").unwrap());
        let error = read(endless).unwrap_err().to_string();
        assert!(error.contains("line 1: it is longer"), "{error}");
        let newer = HEADER.replace("\"routing\":1", "\"routing\":2");
        let error = read(newer.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn a_full_disk_is_told_at_the_end() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        let header = serde_json::from_str(HEADER).unwrap();
        let mut recorder = Recorder::new(Box::new(full.unwrap()), &header);
        recorder.event(&Event::Routed {
            layer: 0,
            experts: vec![0, 1],
        });
        assert!(recorder.finish().is_err());
    }
}
