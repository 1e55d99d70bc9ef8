//! Reads the rows of a sequence one by one, and fills them: what a KV file saves and restores.

use std::sync::Arc;

use super::layout::{KvShape, List};
use super::table::PageTable;

/// Rows to be saved.
pub trait KvSource {
    /// What is kept of a token.
    fn shape(&self) -> KvShape;
    /// How many rows of a list a text with the same beginning can use: 0 where the first ones are missing.
    fn known(&self, list: usize) -> usize;
    /// Copies row `row` of a list.
    fn read(&self, list: usize, row: usize, to: &mut [f32]);
}

/// Takes rows that were saved: those of each list in order.
pub trait KvSink {
    /// The next row of a list.
    fn push(&mut self, list: usize, row: &[f32]);
}

/// The rows of a sequence, in the lists of [`KvShape::lists`].
#[derive(Clone, Copy, Debug)]
pub struct KvView<'a> {
    /// The pages of the sequence, and how many rows they have.
    pub(in crate::model) main: (&'a PageTable, usize),
    /// Those of the prediction layer, where it is used. Its rows begin at slot 1.
    pub(in crate::model) draft: Option<(&'a PageTable, usize)>,
}

impl KvView<'_> {
    /// The table with a list, the lists of its blocks, and the slot of its first row.
    fn find(&self, list: usize) -> (&PageTable, &[List], usize) {
        let (main, _) = self.main;
        if let Some(blocks) = main.layout().blocks(list) {
            return (main, blocks, 0);
        }
        let draft = self.draft.and_then(|(draft, _)| {
            let blocks = draft.layout().blocks(list - main.layout().row_lists())?;
            Some((draft, blocks, 1))
        });
        draft.unwrap_or_else(|| panic!("there is no list {list}"))
    }
}

impl KvSource for KvView<'_> {
    fn shape(&self) -> KvShape {
        let draft = self
            .draft
            .map(|(table, _)| table.layout().shape().0.clone());
        let main = self.main.0.layout().shape().0.clone();
        KvShape([main, draft.unwrap_or_default()].concat())
    }

    fn known(&self, list: usize) -> usize {
        let (main, rows) = self.main;
        match list < main.layout().row_lists() {
            true => rows,
            false => self.draft.map_or(0, |(_, rows)| rows),
        }
    }

    fn read(&self, list: usize, row: usize, mut to: &mut [f32]) {
        let (table, blocks, origin) = self.find(list);
        for block in blocks {
            let values = table.rows(*block, origin).row(row);
            let (first, rest) = to.split_at_mut(values.len());
            first.copy_from_slice(values);
            to = rest;
        }
    }
}

/// Fills the pages of a sequence. Rows of a prediction layer that is not used are left out, and so are rows beyond the reserved ones.
#[derive(Debug)]
pub struct KvWriter<'a> {
    pub(in crate::model) main: &'a mut PageTable,
    pub(in crate::model) draft: Option<&'a mut PageTable>,
    /// Rows of every list that may be filled.
    pub(in crate::model) tokens: usize,
    /// Rows that were filled, by list.
    pub(in crate::model) filled: Vec<usize>,
}

impl KvWriter<'_> {
    /// The greatest number of rows that the lists `lists` have.
    pub(in crate::model) fn most(&self, lists: std::ops::Range<usize>) -> usize {
        let filled = lists.filter_map(|list| self.filled.get(list).copied());
        filled.max().unwrap_or(0)
    }

    /// The least number of rows that the lists `lists` have.
    pub(in crate::model) fn least(&self, lists: std::ops::Range<usize>) -> usize {
        let filled = lists.map(|list| self.filled.get(list).copied().unwrap_or(0));
        filled.min().unwrap_or(0)
    }
}

impl KvSink for KvWriter<'_> {
    fn push(&mut self, index: usize, row: &[f32]) {
        if self.filled.len() <= index {
            self.filled.resize(index + 1, 0);
        }
        let at = self.filled[index];
        self.filled[index] += 1;
        if at >= self.tokens {
            return;
        }
        let mains = self.main.layout().row_lists();
        let (table, index, slot) = match (index < mains, &mut self.draft) {
            (true, _) => (&mut *self.main, index, at),
            (false, Some(draft)) => (&mut **draft, index - mains, at + 1),
            (false, None) => return,
        };
        let (layout, mut row) = (Arc::clone(table.layout()), row);
        for block in layout.blocks(index).unwrap_or_default() {
            let (first, rest) = row.split_at(block.width);
            table.row_mut(*block, slot).copy_from_slice(first);
            row = rest;
        }
    }
}
