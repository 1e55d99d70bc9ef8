//! Names the cache rows of one sequence's part of a batch.

use super::table::{PageTable, Rows};

/// Consecutive rows of a batch that belong to one sequence, and where their cache rows go in one layer.
#[derive(Debug)]
pub struct KvSpan<'a> {
    /// The pages of the sequence.
    pub table: &'a mut PageTable,
    /// Index of the layer in the layout of the table.
    pub layer: usize,
    /// Slot of position 0.
    pub origin: usize,
    /// Position of the first row.
    pub position: usize,
    /// Index of the first row in the batch.
    pub row: usize,
    /// Number of rows, at least 1.
    pub rows: usize,
    /// The cache rows exist already and stay as they are.
    pub computed: bool,
}

impl<'a> KvSpan<'a> {
    /// The part of it in the rows `start..end` of the batch, counted from `start`.
    pub fn within(&mut self, start: usize, end: usize) -> Option<KvSpan<'_>> {
        let first = self.row.max(start);
        let last = (self.row + self.rows).min(end);
        (first < last).then(|| KvSpan {
            table: self.table,
            layer: self.layer,
            origin: self.origin,
            position: self.position + (first - self.row),
            row: first - start,
            rows: last - first,
            computed: self.computed,
        })
    }

    /// Block `block` of the key-values of the sequence, by position.
    pub fn kv(&self, block: usize) -> Rows<'_> {
        let list = self.table.layout().kv(self.layer, block);
        self.table.rows(list, self.origin)
    }

    /// The indexer's keys of the sequence, by position.
    pub fn index_keys(&self) -> Option<Rows<'_>> {
        let keys = self.table.layout().index_keys(self.layer)?;
        Some(self.table.rows(keys, self.origin))
    }

    /// Block `block` of the key-value of row `i` of the span, to be written; `None` if it exists already.
    pub fn kv_mut(&mut self, i: usize, block: usize) -> Option<&mut [f32]> {
        let list = self.table.layout().kv(self.layer, block);
        let slot = self.origin + self.position + i;
        (!self.computed).then(|| self.table.row_mut(list, slot))
    }

    /// The indexer's key of row `i` of the span, to be written; `None` if it exists already.
    pub fn index_key_mut(&mut self, i: usize) -> Option<&mut [f32]> {
        let list = self.table.layout().index_keys(self.layer)?;
        let slot = self.origin + self.position + i;
        (!self.computed).then(|| self.table.row_mut(list, slot))
    }
}

/// The span that has row `row`, and the position of that row in its sequence. Spans are in order and leave no row out.
pub fn span_of<'s, 'a>(spans: &'s [KvSpan<'a>], row: usize) -> (&'s KvSpan<'a>, usize) {
    let span = &spans[spans.partition_point(|span| span.row <= row) - 1];
    (span, span.position + (row - span.row))
}
