//! Maps the tokens of one sequence to pages: appends rows, reads runs of them, copies a shared page before it is written.
//!
//! Token t has slot t. A table may begin late: then it has no pages for the slots before its first.

use std::sync::Arc;

use super::layout::{List, PAGE, PageLayout};
use super::page::{Page, pages_for};

/// The pages of one sequence.
#[derive(Debug)]
pub struct PageTable {
    layout: Arc<PageLayout>,
    /// Pages before the first one that the table has.
    skipped: usize,
    pages: Vec<Arc<Page>>,
}

impl PageTable {
    /// A table without pages.
    pub fn new(layout: &Arc<PageLayout>) -> PageTable {
        PageTable {
            layout: Arc::clone(layout),
            skipped: 0,
            pages: Vec::new(),
        }
    }

    /// The layout of its pages.
    pub fn layout(&self) -> &Arc<PageLayout> {
        &self.layout
    }

    /// The pages, first to last.
    pub fn pages(&self) -> &[Arc<Page>] {
        &self.pages
    }

    /// Pages that [`PageTable::reserve`] allocates for the slots `start..end`, at most: a shared page may have lost its other
    /// holders by then.
    pub fn missing(&self, start: usize, end: usize) -> usize {
        let kept = match self.pages.len() {
            0 => start / PAGE,
            n => pages_for(start).min(self.skipped + n),
        };
        pages_for(end).saturating_sub(kept) + usize::from(self.shared(start).is_some())
    }

    /// The index of the page that has slot `start` and rows before it, if it has another holder.
    fn shared(&self, start: usize) -> Option<usize> {
        if start.is_multiple_of(PAGE) {
            return None;
        }
        let index = (start / PAGE).checked_sub(self.skipped)?;
        let page = self.pages.get(index)?;
        (Arc::strong_count(page) > 1).then_some(index)
    }

    /// Whether [`PageTable::reserve`] has to copy the page of slot `start`.
    pub fn is_shared(&self, start: usize) -> bool {
        self.shared(start).is_some()
    }

    /// The page of slot `start`, if it has another holder and rows before that slot.
    pub fn shared_page(&self, start: usize) -> Option<&Arc<Page>> {
        self.shared(start).map(|index| &self.pages[index])
    }

    /// Makes the slots `start..end` writable: pages for all of them, none shared. `allocate` is asked for each new page; returns
    /// false when it has none, and then the caller truncates.
    pub fn reserve(
        &mut self,
        start: usize,
        end: usize,
        mut allocate: impl FnMut() -> Option<Arc<Page>>,
    ) -> bool {
        // Pages behind that of `start` hold nothing that counts.
        self.truncate(start);
        if self.pages.is_empty() {
            self.skipped = start / PAGE;
        }
        if let Some(index) = self.shared(start) {
            let Some(mut copy) = allocate() else {
                return false;
            };
            // `allocate` may have dropped the other holder.
            if Arc::strong_count(&self.pages[index]) > 1 {
                if let Some(page) = Arc::get_mut(&mut copy) {
                    page.copy_rows(&self.layout, &self.pages[index], start % PAGE);
                }
                self.pages[index] = copy;
            }
        }
        while (self.skipped + self.pages.len()) * PAGE < end {
            let Some(page) = allocate() else {
                return false;
            };
            self.pages.push(page);
        }
        true
    }

    /// Lets go of the pages that have no slot before `len`.
    pub fn truncate(&mut self, len: usize) {
        self.pages
            .truncate(pages_for(len).saturating_sub(self.skipped));
        if self.pages.is_empty() {
            self.skipped = 0;
        }
    }

    /// Appends a page of another table, or of the prefix tree.
    pub fn push(&mut self, page: Arc<Page>) {
        self.pages.push(page);
    }

    /// Takes `page`, which has the same rows, in the place of page `index`.
    pub fn replace(&mut self, index: usize, page: &Arc<Page>) {
        self.pages[index] = Arc::clone(page);
    }

    /// All values of page `index`, which must be reserved.
    ///
    /// # Panics
    /// When the page is shared or missing.
    pub fn page_mut(&mut self, index: usize) -> &mut [f32] {
        let page = Arc::get_mut(&mut self.pages[index]).expect("a reserved page has one holder");
        page.values_mut()
    }

    /// The row of `list` at `slot`, which must be reserved.
    ///
    /// # Panics
    /// When the page of the slot is shared or missing.
    pub fn row_mut(&mut self, list: List, slot: usize) -> &mut [f32] {
        let page = &mut self.pages[slot / PAGE - self.skipped];
        let page = Arc::get_mut(page).expect("a reserved page has one holder");
        page.row_mut(list, slot % PAGE)
    }

    /// The rows of `list` from slot `origin` on.
    pub fn rows(&self, list: List, origin: usize) -> Rows<'_> {
        Rows {
            pages: &self.pages,
            skipped: self.skipped,
            list,
            origin,
        }
    }
}

/// Rows of one list of a table, counted from a slot on.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pages: &'a [Arc<Page>],
    skipped: usize,
    list: List,
    origin: usize,
}

impl<'a> Rows<'a> {
    /// Values of a row.
    pub fn width(&self) -> usize {
        self.list.width
    }

    /// Row `row`.
    pub fn row(&self, row: usize) -> &'a [f32] {
        self.run(row, 1)
    }

    /// The rows from `first` on that are contiguous: to the end of their page, and `most` at most.
    pub fn run(&self, first: usize, most: usize) -> &'a [f32] {
        let slot = self.origin + first;
        let rows = most.min(PAGE - slot % PAGE);
        self.pages[slot / PAGE - self.skipped].rows(self.list, slot % PAGE, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{KvShape, LayerWidths};
    use super::super::page::PagePool;
    use super::*;

    fn pool(capacity: usize) -> PagePool {
        let layer = |kv, index_key| LayerWidths {
            kv,
            index_key,
            ahead: 0,
        };
        let shape = KvShape(vec![layer(3, None), layer(3, Some(2))]);
        PagePool::new(PageLayout::new(shape, 1), capacity)
    }

    fn fill(table: &mut PageTable, pool: &PagePool, start: usize, end: usize, mark: f32) {
        assert!(table.reserve(start, end, || pool.allocate()));
        let lists = pool.layout().lists().to_vec();
        for slot in start..end {
            for list in &lists {
                table.row_mut(*list, slot).fill(slot as f32 + mark);
            }
        }
    }

    #[test]
    fn rows_survive_growth_and_truncation() {
        let pool = pool(9);
        let mut table = PageTable::new(pool.layout());
        fill(&mut table, &pool, 0, 150, 0.5);
        assert_eq!(pool.free(), 6);
        table.truncate(70);
        assert_eq!(pool.free(), 7);
        fill(&mut table, &pool, 70, 200, 0.25);
        for &list in pool.layout().lists() {
            let rows = table.rows(list, 0);
            for slot in 0..200 {
                let mark = if slot < 70 { 0.5 } else { 0.25 };
                assert!(rows.row(slot).iter().all(|x| *x == slot as f32 + mark));
            }
            assert_eq!(rows.run(60, 100).len(), 4 * list.width);
            assert_eq!(table.rows(list, 60).run(4, 3).len(), 3 * list.width);
            assert_eq!(table.rows(list, 60).row(4)[0], 64.5);
        }
        drop(table);
        assert_eq!((pool.free(), pool.bytes()), (9, 0));
    }

    #[test]
    fn a_shared_page_is_copied_before_it_is_written() {
        let pool = pool(4);
        let list = pool.layout().kv(1, 0);
        let mut table = PageTable::new(pool.layout());
        fill(&mut table, &pool, 0, 100, 0.5);
        let mut other = PageTable::new(pool.layout());
        table
            .pages()
            .iter()
            .for_each(|page| other.push(Arc::clone(page)));
        assert_eq!((pool.free(), other.missing(70, 71)), (2, 1));
        fill(&mut other, &pool, 70, 90, 0.25);
        assert_eq!(pool.free(), 1);
        assert_eq!(table.rows(list, 0).row(80)[0], 80.5);
        assert_eq!(other.rows(list, 0).row(69)[0], 69.5);
        assert_eq!(other.rows(list, 0).row(80)[0], 80.25);
        // Appending after a whole shared page copies nothing.
        let mut third = PageTable::new(pool.layout());
        third.push(Arc::clone(&table.pages()[0]));
        assert_eq!(third.missing(64, 65), 1);
        fill(&mut third, &pool, 64, 65, 0.0);
        assert!(!third.reserve(65, 400, || pool.allocate()), "exhausted");
        third.truncate(65);
        assert_eq!(third.rows(list, 0).row(64)[0], 64.0);
    }

    #[test]
    fn a_table_may_begin_late() {
        let pool = pool(3);
        let list = pool.layout().kv(0, 0);
        let mut table = PageTable::new(pool.layout());
        fill(&mut table, &pool, 1000, 1030, 0.5);
        assert_eq!(pool.free(), 1);
        assert_eq!(table.rows(list, 1000).row(29)[0], 1029.5);
        table.truncate(1001);
        assert_eq!(table.rows(list, 1000).row(0)[0], 1000.5);
        table.truncate(0);
        fill(&mut table, &pool, 0, 1, 0.5);
        assert_eq!(table.rows(list, 0).row(0)[0], 0.5);
    }
}
