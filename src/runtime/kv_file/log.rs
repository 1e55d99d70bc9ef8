//! What the records of a file add up to. Reading and writing go through the same rules: every record that is written is applied to the
//! state as if it had been read.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crc32fast::Hasher;

use super::error::Flaw;
use super::head::{Mark, RECORDS};
use super::record::{HEAD, Head, Kind, MAX_PAYLOAD, Numbers};
use crate::checksum;
use crate::model::{KvShape, LayerWidths};

/// Bytes of a `Rows` payload before the values: list, first row, number of rows.
pub const ROWS_HEAD: usize = 12;

/// Bytes of a layer in a `Shape` payload: width of a key-value, of an index key (0 where there is none), `ahead`.
pub const SHAPE: usize = 12;

/// Rows of one list in one record that no later turn has replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the list, in the order of [`crate::model::KvShape::lists`].
    pub list: usize,
    /// Position of the first row.
    pub first: usize,
    /// Number of rows.
    pub count: usize,
    /// Where the record begins.
    pub offset: u64,
}

/// The state after some turns.
#[derive(Clone, Debug)]
pub struct State {
    pub mark: Mark,
    /// All tokens of the conversation.
    pub ids: Vec<u32>,
    /// What is kept of a token, layers that predict last; `None` before the first turn.
    pub shape: Option<KvShape>,
    /// What the one who appends wants to have with the text.
    pub note: Vec<u8>,
    /// Of each list, the width of a row, and how many tokens after its own it depends on.
    lists: Vec<(usize, usize)>,
    /// Rows of each list.
    stored: Vec<usize>,
    /// Where they are; those of a list in order.
    pub extents: Vec<Extent>,
    /// Whether a turn has begun and not ended.
    within: bool,
}

impl State {
    /// That of a file without turns.
    pub fn empty() -> State {
        State {
            mark: Mark::EMPTY,
            ids: Vec::new(),
            shape: None,
            note: Vec::new(),
            lists: Vec::new(),
            stored: Vec::new(),
            extents: Vec::new(),
            within: false,
        }
    }

    /// Reads all records that count. `buffer` is for payloads.
    pub fn read(file: &File, mark: Mark, buffer: &mut Vec<u8>) -> Result<State, Flaw> {
        let len = file.metadata()?.len();
        if len < mark.end {
            return Err(Flaw::Damaged(format!(
                "it is truncated: it has {len} of {} bytes",
                mark.end
            )));
        }
        let mut state = State::empty();
        while state.mark.end < mark.end {
            state.step(file, mark.end, buffer)?;
        }
        let same = (state.mark.turns, state.mark.end) == (mark.turns, mark.end)
            && checksum::same(state.mark.sum, mark.sum);
        if state.within || !same {
            let what = "its records are not those that its mark counts";
            return Err(Flaw::Damaged(what.into()));
        }
        Ok(state)
    }

    /// The state one turn later, if a whole one follows what counts.
    pub fn turn_after(&self, file: &File, buffer: &mut Vec<u8>) -> Option<State> {
        let len = file.metadata().ok()?.len();
        let mut state = self.clone();
        while state.mark.turns == self.mark.turns {
            state.step(file, len, buffer).ok()?;
        }
        Some(state)
    }

    /// Reads the record at the end, which must not go beyond `limit`.
    fn step(&mut self, file: &File, limit: u64, buffer: &mut Vec<u8>) -> Result<(), Flaw> {
        let offset = self.mark.end;
        let head = read_record(file, offset, limit, buffer)?;
        self.apply(&head, buffer)
    }

    /// Appends a record.
    pub fn apply(&mut self, head: &Head, payload: &[u8]) -> Result<(), Flaw> {
        let offset = self.mark.end;
        let cannot = |what| Flaw::at(offset, what);
        let begins = matches!(head.kind, Kind::Shape | Kind::Turn);
        if begins == self.within || (head.kind == Kind::Turn && self.shape.is_none()) {
            return Err(cannot("a record in the wrong place"));
        }
        let mut numbers = Numbers(payload);
        let applied = match head.kind {
            Kind::Shape => self.set_shape(payload),
            Kind::Turn => self.begin(&mut numbers),
            Kind::Ids => self.append_ids(payload),
            Kind::Rows => self.append_rows(&mut numbers, offset),
            Kind::Note => {
                self.note.extend_from_slice(payload);
                Some(())
            }
            Kind::End => self.end(&mut numbers),
        };
        applied.ok_or_else(|| cannot("a record with numbers that cannot be"))?;
        let mut sum = Hasher::new_with_initial(self.mark.sum);
        sum.update(&head.to_bytes());
        self.mark.sum = sum.finalize();
        self.mark.end += (HEAD + payload.len()) as u64;
        Ok(())
    }

    fn set_shape(&mut self, payload: &[u8]) -> Option<()> {
        let (layers, []) = payload.as_chunks::<SHAPE>() else {
            return None;
        };
        let layer = |bytes: &[u8; SHAPE]| {
            let mut numbers = Numbers(bytes);
            let mut next = || numbers.u32().map(|n| n as usize);
            let (kv, key, ahead) = (next()?, next()?, next()?);
            let fits = |width: usize| width <= (MAX_PAYLOAD - ROWS_HEAD) / 4;
            (kv > 0 && fits(kv) && fits(key)).then_some(LayerWidths {
                kv,
                index_key: (key > 0).then_some(key),
                ahead,
            })
        };
        let shape = KvShape(layers.iter().map(layer).collect::<Option<_>>()?);
        let grows = |known: &KvShape| shape.0.len() > known.0.len() && shape.agrees_with(known);
        if shape.0.is_empty() || !self.shape.as_ref().is_none_or(grows) {
            return None;
        }
        self.lists = shape.lists().collect();
        // Lists that are there keep their rows and their numbers.
        self.stored.resize(self.lists.len(), 0);
        self.shape = Some(shape);
        Some(())
    }

    fn begin(&mut self, numbers: &mut Numbers) -> Option<()> {
        let (turn, kept) = (numbers.u64()?, usize::try_from(numbers.u64()?).ok()?);
        if turn != self.mark.turns + 1 || kept > self.ids.len() || !numbers.0.is_empty() {
            return None;
        }
        // A row that depends on a token that has gone goes too.
        let ends = kept < self.ids.len();
        for list in 0..self.lists.len() {
            let ahead = if ends { self.lists[list].1 } else { 0 };
            self.cut(list, kept.saturating_sub(ahead));
        }
        self.ids.truncate(kept);
        self.note.clear();
        self.within = true;
        Some(())
    }

    fn append_ids(&mut self, payload: &[u8]) -> Option<()> {
        let (ids, []) = payload.as_chunks::<4>() else {
            return None;
        };
        self.ids
            .extend(ids.iter().map(|id| u32::from_le_bytes(*id)));
        Some(())
    }

    fn append_rows(&mut self, numbers: &mut Numbers, offset: u64) -> Option<()> {
        let mut next = || numbers.u32().map(|n| n as usize);
        let (list, first, count) = (next()?, next()?, next()?);
        let (width, stored) = (self.lists.get(list)?.0, *self.stored.get(list)?);
        let values = count.checked_mul(width)?.checked_mul(4)?;
        let end = first.checked_add(count)?;
        if values != numbers.0.len() || first != stored || end > self.ids.len() || count == 0 {
            return None;
        }
        self.stored[list] = end;
        self.extents.push(Extent {
            list,
            first,
            count,
            offset,
        });
        Some(())
    }

    fn end(&mut self, numbers: &mut Numbers) -> Option<()> {
        let (turn, tokens) = (numbers.u64()?, numbers.u64()?);
        if turn != self.mark.turns + 1 || tokens != self.ids.len() as u64 || !numbers.0.is_empty() {
            return None;
        }
        self.mark.turns = turn;
        self.within = false;
        Some(())
    }

    /// Forgets the rows of a list from `len` on.
    fn cut(&mut self, list: usize, len: usize) {
        if self.stored[list] <= len {
            return;
        }
        self.stored[list] = len;
        self.extents.retain_mut(|extent| {
            if extent.list == list {
                extent.count = extent.count.min(len.saturating_sub(extent.first));
            }
            extent.count > 0
        });
    }

    /// Width of a row of a list.
    pub fn width(&self, list: usize) -> usize {
        self.lists[list].0
    }

    /// Rows of a list that a text has in common whose first `tokens` tokens are those of this one.
    pub fn common_rows(&self, list: usize, tokens: usize) -> usize {
        tokens.saturating_sub(self.lists[list].1)
    }

    /// Rows of each list.
    pub fn stored(&self) -> &[usize] {
        &self.stored
    }

    /// Tokens of which every list has a row, but for those of layers that predict.
    pub fn rows(&self) -> usize {
        let lists = self.stored.iter().zip(&self.lists);
        let rows = lists.filter(|(_, (_, ahead))| *ahead == 0).map(|(n, _)| *n);
        rows.min().unwrap_or(0)
    }

    /// Whether most of the file is rows that later turns have replaced.
    pub fn is_wasteful(&self) -> bool {
        const WORTH_IT: u64 = 4 << 20;
        let rows = self.extents.iter();
        let live: u64 = rows
            .map(|e| 4 * (e.count * self.width(e.list)) as u64)
            .sum();
        self.mark.end - RECORDS > live.saturating_mul(2).saturating_add(WORTH_IT)
    }
}

/// Reads and checks the record at `offset`, of which the payload is left in `buffer`. It must not go beyond `limit`.
pub fn read_record(
    file: &File,
    offset: u64,
    limit: u64,
    buffer: &mut Vec<u8>,
) -> Result<Head, Flaw> {
    let room = limit.saturating_sub(offset);
    let beyond = || Flaw::at(offset, "a record goes beyond what counts");
    if room < HEAD as u64 {
        return Err(beyond());
    }
    let mut bytes = [0; HEAD];
    file.read_exact_at(&mut bytes, offset)?;
    let head = Head::from_bytes(&bytes, offset)?;
    if room < (HEAD + head.len) as u64 {
        return Err(beyond());
    }
    buffer.resize(head.len, 0);
    file.read_exact_at(buffer, offset + HEAD as u64)?;
    head.check(buffer, offset)?;
    Ok(head)
}
