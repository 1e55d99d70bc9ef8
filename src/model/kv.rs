//! What attention remembers of earlier tokens.
//!
//! A token leaves, per layer, its compressed key-value and rotated key (`kv_lora_rank + qk_rope_head_dim`
//! values), and in layers with an indexer also the indexer's key. Rows live in pages, so that the cache grows
//! with the context without ever being copied and attention works through blocks that fit the L2 cache.

/// Rows of a page.
pub const PAGE: usize = 64;

/// A growing list of rows of one width.
#[derive(Debug)]
pub struct Rows {
    width: usize,
    len: usize,
    pages: Vec<Box<[f32]>>,
}

impl Rows {
    /// No rows yet, of `width` values each.
    pub fn new(width: usize) -> Rows {
        Rows {
            width,
            len: 0,
            pages: Vec::new(),
        }
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends a row of `width` values.
    pub fn push(&mut self, row: &[f32]) {
        let at = self.len % PAGE;
        if at == 0 {
            self.pages
                .push(vec![0.0; PAGE * self.width].into_boxed_slice());
        }
        if let Some(page) = self.pages.last_mut() {
            page[at * self.width..(at + 1) * self.width].copy_from_slice(row);
        }
        self.len += 1;
    }

    /// Row `i`, which must be below `len`.
    pub fn row(&self, i: usize) -> &[f32] {
        let at = i % PAGE;
        &self.pages[i / PAGE][at * self.width..(at + 1) * self.width]
    }

    /// The first `rows` rows of page `page`.
    pub fn page(&self, page: usize, rows: usize) -> &[f32] {
        &self.pages[page][..rows * self.width]
    }

    /// Forgets all rows from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            self.len = len;
            self.pages.truncate(len.div_ceil(PAGE));
        }
    }

    /// Bytes that `len` rows of `width` values take.
    pub fn bytes_for(width: usize, len: usize) -> u64 {
        (len.div_ceil(PAGE) as u64).saturating_mul((PAGE * width * size_of::<f32>()) as u64)
    }

    fn bytes(&self) -> u64 {
        Rows::bytes_for(self.width, self.len)
    }
}

/// The cache of one layer.
#[derive(Debug)]
pub struct LayerCache {
    /// Per token: the compressed key-value after its norm, then the key after its rotation.
    pub kv: Rows,
    /// Per token: the indexer's key. Kept from the first token on, also while attention is still dense.
    pub index_keys: Option<Rows>,
}

/// The cache of all layers.
#[derive(Debug)]
pub struct KvCache {
    /// By layer. That of the prediction layer comes last, where it is used; it may have fewer rows than the others: row t is known
    /// when token t + 1 is.
    pub layers: Vec<LayerCache>,
}

impl LayerCache {
    /// Forgets all tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.kv.truncate(len);
        if let Some(keys) = &mut self.index_keys {
            keys.truncate(len);
        }
    }
}

impl KvCache {
    /// Forgets all tokens from `len` on, in every layer.
    pub fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
    }

    /// Bytes in use.
    pub fn bytes(&self) -> u64 {
        let layer = |l: &LayerCache| l.kv.bytes() + l.index_keys.as_ref().map_or(0, Rows::bytes);
        self.layers.iter().map(layer).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_growth_and_truncation() {
        let mut rows = Rows::new(3);
        let row = |i: usize| [i as f32, 0.5, -(i as f32)];
        (0..150).for_each(|i| rows.push(&row(i)));
        assert_eq!(rows.bytes(), 3 * PAGE as u64 * 3 * 4);
        rows.truncate(70);
        assert_eq!((rows.len, rows.pages.len()), (70, 2));
        (70..200).for_each(|i| rows.push(&row(i)));
        (0..200).for_each(|i| assert_eq!(rows.row(i), row(i)));
        assert_eq!(&rows.page(1, 2)[3..], row(65));
        rows.truncate(0);
        assert_eq!(rows.bytes(), 0);
    }
}
