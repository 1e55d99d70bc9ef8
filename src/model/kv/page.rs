//! Allocates pages and counts their references.
//!
//! A page is an `Arc`: the sequences whose text goes through it hold it, and so does the prefix tree. A page is written only while
//! it has one holder. Its memory is freed, and its place in the pool with it, when the last holder lets go.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::layout::{List, PAGE, PageLayout};

/// The rows of up to [`PAGE`] consecutive tokens, in every layer of a [`PageLayout`].
#[derive(Debug)]
pub struct Page {
    values: Box<[f32]>,
    in_use: Arc<AtomicUsize>,
}

impl Page {
    /// `rows` rows of `list` from row `first` on.
    pub fn rows(&self, list: List, first: usize, rows: usize) -> &[f32] {
        &self.values[list.range(first, rows)]
    }

    /// Row `row` of `list`, to be written.
    pub fn row_mut(&mut self, list: List, row: usize) -> &mut [f32] {
        &mut self.values[list.range(row, 1)]
    }

    /// All values, for a swap file.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values, from a swap file.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Copies the first `rows` rows of every layer from `other`.
    pub fn copy_rows(&mut self, layout: &PageLayout, other: &Page, rows: usize) {
        for list in layout.lists() {
            let range = list.range(0, rows);
            self.values[range.clone()].copy_from_slice(&other.values[range]);
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.in_use.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Allocates the pages of one layout, up to a number of them.
#[derive(Debug)]
pub struct PagePool {
    layout: Arc<PageLayout>,
    capacity: usize,
    in_use: Arc<AtomicUsize>,
}

impl PagePool {
    /// A pool of at most `capacity` pages. Memory is allocated page by page.
    pub fn new(layout: PageLayout, capacity: usize) -> PagePool {
        PagePool {
            layout: Arc::new(layout),
            capacity,
            in_use: Arc::default(),
        }
    }

    /// The layout of its pages.
    pub fn layout(&self) -> &Arc<PageLayout> {
        &self.layout
    }

    /// Pages, allocated or not.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Pages that can be allocated.
    pub fn free(&self) -> usize {
        self.capacity - self.in_use.load(Ordering::Relaxed)
    }

    /// Bytes of the allocated pages.
    pub fn bytes(&self) -> u64 {
        let pages = self.in_use.load(Ordering::Relaxed) as u64;
        pages * (self.layout.values() * size_of::<f32>()) as u64
    }

    /// A page of zeros. While the pool is exhausted, `evict` is asked to free a page; `None` when it cannot.
    pub fn allocate_or(&self, mut evict: impl FnMut() -> bool) -> Option<Arc<Page>> {
        while self.free() == 0 {
            if !evict() {
                return None;
            }
        }
        self.allocate()
    }

    /// A page of zeros; `None` when the pool is exhausted.
    pub fn allocate(&self) -> Option<Arc<Page>> {
        // Only the owner of the pool allocates; other threads can only free.
        if self.free() == 0 {
            return None;
        }
        self.in_use.fetch_add(1, Ordering::Relaxed);
        Some(Arc::new(Page {
            values: vec![0.0; self.layout.values()].into_boxed_slice(),
            in_use: Arc::clone(&self.in_use),
        }))
    }
}

/// Pages that `tokens` tokens take.
pub fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}
