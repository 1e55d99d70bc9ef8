//! Lays out the rows of a page: what each layer keeps of a token, and where in a page it is.

use std::ops::Range;

/// Tokens of a page.
pub const PAGE: usize = 64;

/// Values that one layer keeps of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerWidths {
    /// Of the compressed key-value and the rotated key.
    pub kv: usize,
    /// Of the indexer's key, in layers that have one.
    pub index_key: Option<usize>,
    /// How many tokens after its own a row depends on: 0, but 1 in the prediction layer.
    pub ahead: usize,
}

/// What a cache keeps of a token, by layer. The prediction layer comes last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape(pub Vec<LayerWidths>);

impl KvShape {
    /// Width and `ahead` of the rows of every list: of each layer the key-values, then the indexer's keys if it has any.
    pub fn lists(&self) -> impl Iterator<Item = (usize, usize)> {
        (self.0.iter())
            .flat_map(|layer| {
                [
                    Some((layer.kv, layer.ahead)),
                    layer.index_key.map(|width| (width, layer.ahead)),
                ]
            })
            .flatten()
    }

    /// Whether the two are the same, except for prediction layers, which only one of them may have.
    pub fn agrees_with(&self, other: &KvShape) -> bool {
        let common = self.0.len().min(other.0.len());
        let mut more = self.0[common..].iter().chain(&other.0[common..]);
        self.0[..common] == other.0[..common] && more.all(|layer| layer.ahead > 0)
    }
}

/// Rows of one width in a page: [`PAGE`] of them, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    /// Values before the first row.
    offset: usize,
    /// Values of a row.
    pub width: usize,
}

impl List {
    /// The values of rows `first..first + rows`.
    pub fn range(self, first: usize, rows: usize) -> Range<usize> {
        let start = self.offset + first * self.width;
        start..start + rows * self.width
    }
}

/// Where the rows of every layer are in a page.
#[derive(Debug)]
pub struct PageLayout {
    shape: KvShape,
    /// In the order of [`KvShape::lists`].
    lists: Vec<List>,
    /// By layer, the list of key-values and that of the indexer's keys.
    layers: Vec<(List, Option<List>)>,
    /// Values of a page.
    values: usize,
}

impl PageLayout {
    /// The layout of pages for `shape`.
    pub fn new(shape: KvShape) -> PageLayout {
        let (mut values, mut lists) = (0, Vec::new());
        let mut list = |width: usize| {
            let list = List {
                offset: values,
                width,
            };
            values += PAGE * width;
            lists.push(list);
            list
        };
        let layers = (shape.0.iter())
            .map(|layer| (list(layer.kv), layer.index_key.map(&mut list)))
            .collect();
        PageLayout {
            shape,
            lists,
            layers,
            values,
        }
    }

    /// What is kept of a token.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Values of a page.
    pub fn values(&self) -> usize {
        self.values
    }

    /// The key-values of a layer.
    pub fn kv(&self, layer: usize) -> List {
        self.layers[layer].0
    }

    /// The indexer's keys of a layer.
    pub fn index_keys(&self, layer: usize) -> Option<List> {
        self.layers[layer].1
    }

    /// All lists, in the order of [`KvShape::lists`].
    pub fn lists(&self) -> &[List] {
        &self.lists
    }

    /// Bytes of the pages of `tokens` tokens, of which each leaves `width` values.
    pub fn bytes_for(width: usize, tokens: usize) -> u64 {
        let page = (PAGE * width * size_of::<f32>()) as u64;
        (tokens.div_ceil(PAGE) as u64).saturating_mul(page)
    }
}
