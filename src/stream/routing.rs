//! Records predictions and decisions of routers in a file, and reads them: routing for the simulation and for comparing cache policies.
//!
//! JSON lines: a [`RoutingHeader`], then a [`RoutingEvent`] each, in the order in which the model met them.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Write};

use serde::{Deserialize, Serialize};

/// The shape of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingHeader {
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

/// What a router predicted or decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoutingEvent {
    /// A prediction of the router of a layer.
    #[serde(rename = "look")]
    Predicted {
        /// Index of the layer in the model.
        layer: usize,
        /// Candidates of each token.
        ranks: usize,
        /// [tokens, ranks], each token's most likely first.
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
    /// The compute time of tokens that were computed one at a time, without waits for reads.
    Measured {
        /// Their number.
        tokens: u64,
        /// Seconds by phase, for all of them together.
        seconds: BTreeMap<String, f64>,
    },
}

/// Writes events. An error is returned at the end: a decode does not depend on its record.
pub struct RoutingRecorder {
    out: Box<dyn Write + Send>,
    failed: Option<io::Error>,
}

impl std::fmt::Debug for RoutingRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RoutingRecorder").finish_non_exhaustive()
    }
}

impl RoutingRecorder {
    /// Writes the header.
    pub fn new(out: Box<dyn Write + Send>, header: &RoutingHeader) -> RoutingRecorder {
        let mut recorder = RoutingRecorder { out, failed: None };
        recorder.line(header);
        recorder
    }

    /// Writes an event.
    pub fn event(&mut self, event: &RoutingEvent) {
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

/// Longer than the line of any prompt that fits into memory.
const MAX_LINE: u64 = 64 << 20;

/// Why a file is not a recorded routing.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A line is not valid JSON, or not an event.
    #[error("line {line}: {source}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// The parser's answer.
        source: serde_json::Error,
    },
    /// A line names a layer or an expert that the model does not have.
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

/// Reads what [`RoutingRecorder`] wrote. Layers, experts and the lengths of lists are checked against the header.
///
/// # Errors
/// [`RoutingError`] naming the line.
pub fn read(mut from: impl BufRead) -> Result<(RoutingHeader, Vec<RoutingEvent>), RoutingError> {
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
    let header: RoutingHeader =
        serde_json::from_slice(&text).map_err(|source| RoutingError::Line { line, source })?;
    if header.routing != VERSION {
        let what = format!("version {} is not {VERSION}", header.routing);
        return Err(RoutingError::Impossible { line, what });
    }
    let mut events = Vec::new();
    while let Some((line, text)) = next()? {
        let event: RoutingEvent =
            serde_json::from_slice(&text).map_err(|source| RoutingError::Line { line, source })?;
        if let Err(what) = check(&event, &header) {
            return Err(RoutingError::Impossible { line, what });
        }
        events.push(event);
    }
    Ok((header, events))
}

fn check(event: &RoutingEvent, header: &RoutingHeader) -> Result<(), String> {
    let (layer, width, experts) = match event {
        RoutingEvent::Predicted {
            layer,
            ranks,
            experts,
        } => (*layer, *ranks, &experts[..]),
        RoutingEvent::Routed { layer, experts } => (*layer, header.top_k, &experts[..]),
        RoutingEvent::Computed { layer } => (*layer, 1, &[0][..]),
        RoutingEvent::Measured { seconds, .. } => {
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
    fn written_events_are_read_back() {
        let header = serde_json::from_str(HEADER).unwrap();
        let events = [
            RoutingEvent::Predicted {
                layer: 3,
                ranks: 3,
                experts: vec![1, 7, 0],
            },
            RoutingEvent::Routed {
                layer: 3,
                experts: vec![1, 2, 5, 6],
            },
            RoutingEvent::Computed { layer: 3 },
            RoutingEvent::Measured {
                tokens: 2,
                seconds: [("head".to_owned(), 0.25)].into(),
            },
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut recorder = RoutingRecorder::new(Box::new(file.reopen().unwrap()), &header);
        events.iter().for_each(|event| recorder.event(event));
        recorder.finish().unwrap();
        let text = std::fs::read(file.path()).unwrap();
        assert_eq!(read(&text[..]).unwrap(), (header, events.to_vec()));
    }

    #[test]
    fn impossible_lines_are_refused_with_their_number() {
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
    fn a_full_disk_is_an_error_at_the_end() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
        let header = serde_json::from_str(HEADER).unwrap();
        let mut recorder = RoutingRecorder::new(Box::new(full.unwrap()), &header);
        recorder.event(&RoutingEvent::Routed {
            layer: 0,
            experts: vec![0, 1],
        });
        assert!(recorder.finish().is_err());
    }
}
