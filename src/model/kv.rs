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

    /// Rows in the list.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
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
    /// How many tokens after its own a row depends on. A list has as many rows less than there are tokens, or still fewer.
    pub ahead: usize,
    /// Position of the first row: 0, but for a layer that predicts and has not seen how the text begins.
    pub first: usize,
}

/// Values that one layer keeps of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerWidths {
    /// Of the compressed key-value and the rotated key.
    pub kv: usize,
    /// Of the indexer's key, in layers that have one.
    pub index_key: Option<usize>,
    /// How many tokens after its own a row depends on: 0, but for layers that predict.
    pub ahead: usize,
}

/// What a cache keeps of a token, by layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape(pub Vec<LayerWidths>);

/// The cache of all layers.
#[derive(Debug)]
pub struct KvCache {
    /// By layer. That of the prediction layer comes last, where it is used; it may have fewer rows than the others: row t is known
    /// when token t + 1 is.
    pub layers: Vec<LayerCache>,
}

impl KvShape {
    /// Width and `ahead` of the rows of every list, in the order of [`KvCache::rows`].
    pub fn lists(&self) -> impl Iterator<Item = (usize, usize)> {
        (self.0.iter())
            .flat_map(|layer| {
                [
                    Some((layer.kv, layer.ahead)),
                    layer.index_key.map(|w| (w, layer.ahead)),
                ]
            })
            .flatten()
    }

    /// Whether they are the same but for layers that predict, which only one of them may have.
    pub fn agrees_with(&self, other: &KvShape) -> bool {
        let common = self.0.len().min(other.0.len());
        let mut more = self.0[common..].iter().chain(&other.0[common..]);
        self.0[..common] == other.0[..common] && more.all(|layer| layer.ahead > 0)
    }
}

impl LayerCache {
    /// A cache without rows.
    pub fn new(widths: &LayerWidths) -> LayerCache {
        LayerCache {
            kv: Rows::new(widths.kv),
            index_keys: widths.index_key.map(Rows::new),
            ahead: widths.ahead,
            first: 0,
        }
    }

    /// Position after the last row.
    pub fn end(&self) -> usize {
        self.first + self.kv.len()
    }

    /// Forgets all tokens from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.first = self.first.min(len);
        self.kv.truncate(len - self.first);
        if let Some(keys) = &mut self.index_keys {
            keys.truncate(len - self.first);
        }
    }

    /// Forgets all tokens. The next row is that of position `first`.
    pub fn begin_at(&mut self, first: usize) {
        self.truncate(0);
        self.first = first;
    }
}

impl KvCache {
    /// A cache without rows.
    pub fn new(shape: &KvShape) -> KvCache {
        KvCache {
            layers: shape.0.iter().map(LayerCache::new).collect(),
        }
    }

    /// What it keeps of a token.
    pub fn shape(&self) -> KvShape {
        let widths = |layer: &LayerCache| LayerWidths {
            kv: layer.kv.width(),
            index_key: layer.index_keys.as_ref().map(Rows::width),
            ahead: layer.ahead,
        };
        KvShape(self.layers.iter().map(widths).collect())
    }

    /// All lists of rows: of each layer the key-values, then the indexer's keys if there are any.
    pub fn rows(&self) -> impl Iterator<Item = &Rows> {
        (self.layers.iter())
            .flat_map(|layer| [Some(&layer.kv), layer.index_keys.as_ref()])
            .flatten()
    }

    /// How many rows of each of these lists a text can go on with that has the same beginning: none where the first ones are missing.
    pub fn known(&self) -> impl Iterator<Item = usize> {
        (self.layers.iter())
            .flat_map(|layer| {
                let known = |rows: &Rows| if layer.first == 0 { rows.len() } else { 0 };
                [Some(&layer.kv), layer.index_keys.as_ref()].map(|rows| rows.map(known))
            })
            .flatten()
    }

    /// The lists of [`KvCache::rows`], to be filled.
    pub fn rows_mut(&mut self) -> impl Iterator<Item = &mut Rows> {
        (self.layers.iter_mut())
            .flat_map(|layer| [Some(&mut layer.kv), layer.index_keys.as_mut()])
            .flatten()
    }

    /// Gives it the layers of `shape`, with which it agrees: those that it lacks have no rows.
    pub fn fit(&mut self, shape: &KvShape) {
        let known = self.layers.len();
        self.layers.truncate(shape.0.len());
        let new = shape.0.iter().skip(known).map(LayerCache::new);
        self.layers.extend(new);
    }

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
