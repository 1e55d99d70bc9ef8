//! Writes a turn: its records first, and only when they are on the disk the mark that makes them count.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::log::{ROWS_HEAD, State};
use super::record::{Head, Kind, MAX_PAYLOAD};
use crate::model::{KvSource, LayerWidths};

/// Bytes that are written at once, about.
const BLOCK: usize = 1 << 20;

/// Records on their way behind those that count.
struct Records<'a> {
    file: &'a File,
    /// With the records so far.
    state: State,
    /// Not written yet; begins at `at`.
    block: Vec<u8>,
    at: u64,
}

impl Records<'_> {
    fn push(&mut self, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let head = Head::of(kind, payload);
        // What would not be read is not written either.
        if self.state.apply(&head, payload).is_err() {
            return Err(io::Error::other("the turn contradicts the ones before it"));
        }
        self.block.extend_from_slice(&head.to_bytes());
        self.block.extend_from_slice(payload);
        if self.block.len() >= BLOCK {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.block, self.at)?;
        self.at += self.block.len() as u64;
        self.block.clear();
        Ok(())
    }

    /// The rows of a list from `first` to `end`.
    fn push_rows(
        &mut self,
        list: usize,
        cache: &impl KvSource,
        first: usize,
        end: usize,
    ) -> io::Result<()> {
        let width = self.state.width(list);
        let in_one = ((MAX_PAYLOAD - ROWS_HEAD) / (4 * width)).max(1);
        let (mut payload, mut row) = (Vec::new(), vec![0.0; width]);
        for start in (first..end).step_by(in_one) {
            let count = in_one.min(end - start);
            payload.clear();
            for number in [list, start, count] {
                payload.extend_from_slice(&(number as u32).to_le_bytes());
            }
            payload.resize(ROWS_HEAD + 4 * width * count, 0);
            let values = payload[ROWS_HEAD..].as_chunks_mut::<4>().0;
            for (i, to) in values.chunks_mut(width).enumerate() {
                cache.read(list, start + i, &mut row);
                to.iter_mut()
                    .zip(&row)
                    .for_each(|(to, x)| *to = x.to_le_bytes());
            }
            self.push(Kind::Rows, &payload)?;
        }
        Ok(())
    }
}

/// Writes the records of a turn behind those that `state` counts: with it, the conversation is `history`, and `cache` has the rows
/// of its beginning; rows beyond it are not saved. A prediction layer may be new, or be missing now: its saved rows stay. Returns the state with the turn, which does not count yet.
pub fn turn(
    file: &File,
    state: &State,
    history: &[u32],
    cache: &impl KvSource,
    note: &[u8],
) -> io::Result<State> {
    let mut records = Records {
        file,
        block: Vec::new(),
        at: state.mark.end,
        state: state.clone(),
    };
    let shape = cache.shape();
    if (state.shape.as_ref()).is_none_or(|known| known.0.len() < shape.0.len()) {
        let widths = |layer: &LayerWidths| {
            [layer.kv, layer.index_key.unwrap_or(0), layer.ahead].map(|n| n as u32)
        };
        let widths = shape.0.iter().flat_map(widths);
        let payload: Vec<u8> = widths.flat_map(u32::to_le_bytes).collect();
        records.push(Kind::Shape, &payload)?;
    }
    let number = state.mark.turns + 1;
    let same = state.ids.iter().zip(history).take_while(|(a, b)| a == b);
    let kept = same.count();
    let pair = |a: u64, b: u64| [a.to_le_bytes(), b.to_le_bytes()].concat();
    records.push(Kind::Turn, &pair(number, kept as u64))?;
    for ids in history[kept..].chunks(MAX_PAYLOAD / 4) {
        let payload: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        records.push(Kind::Ids, &payload)?;
    }
    for list in 0..shape.lists().count() {
        let first = records.state.stored()[list];
        let end = cache.known(list).min(history.len());
        records.push_rows(list, cache, first, end)?;
    }
    for note in note.chunks(MAX_PAYLOAD) {
        records.push(Kind::Note, note)?;
    }
    records.push(Kind::End, &pair(number, history.len() as u64))?;
    records.flush()?;
    Ok(records.state)
}
