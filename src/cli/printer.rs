//! Prints tokens as they are generated.

use std::io::{self, Write};

use colibri_uring::tokenizer::{TextStream, Tokenizer};

/// Writes each token at once: its text, or its id where there is no tokenizer.
pub struct Printer<'a, W> {
    out: W,
    stream: Option<TextStream<'a>>,
    empty: bool,
}

impl<'a, W: Write> Printer<'a, W> {
    pub fn new(out: W, tokenizer: Option<&'a Tokenizer>) -> Printer<'a, W> {
        Printer {
            out,
            stream: tokenizer.map(Tokenizer::stream),
            empty: true,
        }
    }

    /// Prints what is certain after one more token; whole characters only.
    pub fn token(&mut self, id: u32) -> anyhow::Result<()> {
        match &mut self.stream {
            Some(stream) => {
                let text = stream.push(id)?;
                self.out.write_all(text.as_bytes())?;
            }
            None if self.empty => write!(self.out, "{id}")?,
            None => write!(self.out, " {id}")?,
        }
        self.empty = false;
        self.out.flush()?;
        Ok(())
    }

    /// Prints what was held back, and ends the line.
    pub fn finish(mut self) -> anyhow::Result<()> {
        if let Some(stream) = self.stream.take() {
            self.out.write_all(stream.finish()?.as_bytes())?;
        }
        self.out.write_all(b"\n")?;
        self.out.flush()?;
        Ok(())
    }
}

/// Nothing is printed: for `--json`, whose one object comes at the end.
pub fn nowhere() -> Box<dyn Write> {
    Box::new(io::sink())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_spaces() {
        let mut out = Vec::new();
        let mut printer = Printer::new(&mut out, None);
        for id in [3, 14, 159] {
            printer.token(id).unwrap();
        }
        printer.finish().unwrap();
        assert_eq!(out, b"3 14 159\n");
    }

    #[test]
    fn a_closed_pipe_is_an_error_that_main_recognises() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let error = Printer::new(Closed, None).token(3).unwrap_err();
        assert!(super::super::is_closed_pipe(&error));
    }
}
