//! Turns the tokens of a request into text, up to a stop string.

use super::error::ApiError;
use super::served::Served;
use crate::runtime::dialect::beginning;
use crate::runtime::tokenizer::{TextStream, Tokenizer};
use crate::serve::Ticket;
use crate::serve::request::{Drawn, Event, Finish, Request, Summary};

/// A token, and the text that it completes.
#[derive(Clone, Debug)]
pub struct Spelled {
    pub drawn: Drawn,
    pub text: String,
}

/// What an answer consists of, in order. [`Piece::End`] is the last one.
#[derive(Debug)]
pub enum Piece {
    /// So much of the prompt is known.
    Progress(usize, usize),
    /// Probabilities of the prompt's tokens, from the second on.
    Prompt(Vec<Drawn>),
    /// Text, and the tokens that are complete with it.
    Text(String, Vec<Spelled>),
    /// The answer is complete.
    End(Finish, Summary),
}

/// The answer to one request.
#[derive(Debug)]
pub struct Answer {
    ticket: Ticket,
    stream: Option<TextStream<'static>>,
    stops: Vec<String>,
    stop_ids: Vec<u32>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Tokens whose text is not out, and where it ends in `held`.
    waiting: Vec<(Spelled, usize)>,
    tokens: usize,
    /// The stop string that was found.
    stopped: Option<String>,
    ended: Option<(Finish, Summary)>,
}

impl Answer {
    /// Submits a request.
    pub fn begin(
        served: &Served,
        request: Request,
        stops: Vec<String>,
    ) -> Result<Answer, ApiError> {
        let stop_ids = request.stop.clone();
        Ok(Answer {
            ticket: served.engine.submit(request)?,
            stream: served.tokenizer.map(Tokenizer::stream),
            stops,
            stop_ids,
            held: String::new(),
            waiting: Vec::new(),
            tokens: 0,
            stopped: None,
            ended: None,
        })
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// The next piece.
    ///
    /// # Errors
    /// The model or the tokenizer fails. Nothing follows.
    pub async fn next(&mut self) -> Result<Piece, ApiError> {
        if let Some((finish, summary)) = self.ended.take() {
            return Ok(Piece::End(finish, summary));
        }
        loop {
            let event = self.ticket.next().await;
            match event.ok_or_else(|| ApiError::internal("the engine has ended"))? {
                Event::Prompt { done, all } => return Ok(Piece::Progress(done, all)),
                Event::PromptLogprobs(drawn) => return Ok(Piece::Prompt(drawn)),
                Event::Failed(error) => return Err(error.into()),
                Event::Token(_) if self.stopped.is_some() => {}
                Event::Token(drawn) => {
                    if let Some(piece) = self.token(drawn)? {
                        return Ok(piece);
                    }
                }
                Event::End(finish, summary) => return self.end(finish, summary),
            }
        }
    }

    fn token(&mut self, drawn: Drawn) -> Result<Option<Piece>, ApiError> {
        self.tokens += 1;
        let text = match &mut self.stream {
            Some(stream) if !self.stop_ids.contains(&drawn.id) => stream.push(drawn.id)?,
            _ => String::new(),
        };
        self.held += &text;
        let end = self.held.len();
        self.waiting.push((Spelled { drawn, text }, end));
        let found = self
            .stops
            .iter()
            .filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
            self.stopped = Some(stop.clone());
            self.ticket.finish();
            self.held.truncate(at);
            self.waiting.retain(|(_, end)| *end <= at);
            return Ok(self.out(at));
        }
        let kept = self
            .stops
            .iter()
            .map(|stop| beginning(&self.held, stop))
            .max();
        let out = self.held.len() - kept.unwrap_or(0);
        Ok(self.out(out))
    }

    /// Gives out the first `len` bytes of the held text.
    fn out(&mut self, len: usize) -> Option<Piece> {
        let text: String = self.held.drain(..len).collect();
        let complete = self
            .waiting
            .iter()
            .take_while(|(_, end)| *end <= len)
            .count();
        let tokens: Vec<Spelled> = self
            .waiting
            .drain(..complete)
            .map(|(token, _)| token)
            .collect();
        self.waiting.iter_mut().for_each(|(_, end)| *end -= len);
        (!text.is_empty() || !tokens.is_empty()).then_some(Piece::Text(text, tokens))
    }

    fn end(&mut self, finish: Finish, summary: Summary) -> Result<Piece, ApiError> {
        let summary = Summary {
            tokens: self.tokens,
            ..summary
        };
        if self.stopped.is_some() {
            return Ok(Piece::End(finish, summary));
        }
        let mut text = std::mem::take(&mut self.held);
        if let Some(stream) = self.stream.take() {
            text += &stream.finish()?;
        }
        let tokens = self.waiting.drain(..).map(|(token, _)| token).collect();
        self.ended = Some((finish, summary));
        Ok(Piece::Text(text, tokens))
    }
}
