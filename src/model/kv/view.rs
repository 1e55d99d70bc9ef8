//! Reads the rows of a sequence one by one, and fills them: what a KV file saves and restores.

use super::layout::{KvShape, List};
use super::table::PageTable;

/// Rows to be saved.
pub trait KvSource {
    /// What is kept of a token.
    fn shape(&self) -> KvShape;
    /// How many rows of a list a text with the same beginning can use: 0 where the first ones are missing.
    fn known(&self, list: usize) -> usize;
    /// Row `row` of a list.
    fn row(&self, list: usize, row: usize) -> &[f32];
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
    fn find(&self, list: usize) -> (&PageTable, List, usize) {
        let (main, _) = self.main;
        let lists = main.layout().lists();
        match (lists.get(list), self.draft) {
            (Some(list), _) => (main, *list, 0),
            (None, Some((draft, _))) => (draft, draft.layout().lists()[list - lists.len()], 1),
            (None, None) => panic!("there is no list {list}"),
        }
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
        match list < main.layout().lists().len() {
            true => rows,
            false => self.draft.map_or(0, |(_, rows)| rows),
        }
    }

    fn row(&self, list: usize, row: usize) -> &[f32] {
        let (table, list, origin) = self.find(list);
        table.rows(list, origin).row(row)
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
        let lists = self.main.layout().lists();
        let (table, list, slot) = match (lists.get(index).copied(), &mut self.draft) {
            (Some(list), _) => (&mut *self.main, list, at),
            (None, Some(draft)) => {
                let list = draft.layout().lists()[index - lists.len()];
                (&mut **draft, list, at + 1)
            }
            (None, None) => return,
        };
        table.row_mut(list, slot).copy_from_slice(row);
    }
}
