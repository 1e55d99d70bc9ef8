//! Lays out the rows of a page: what each layer keeps of a token, and where in a page it is.

use std::ops::Range;

/// Tokens of a page.
pub const PAGE: usize = 64;

/// Values that one layer keeps of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerWidths {
    /// Of the key-value: with MLA the compressed key-value and the rotated key, with GQA the keys and then the values of all heads.
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

/// Rows of one width in a page: [`PAGE`] of them, contiguous. A row of key-values may be several blocks, each in a separate list.
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
    /// In the order of their offsets.
    lists: Vec<List>,
    /// By list of [`KvShape::lists`], those of `lists` that hold its rows: one for each block.
    rows: Vec<Range<usize>>,
    /// By layer, the first of `lists` with key-values, and that with the indexer's keys.
    layers: Vec<(usize, Option<usize>)>,
    /// Values of a page.
    values: usize,
}

impl PageLayout {
    /// The layout of pages for `shape`. Rows of key-values are cut into `blocks` blocks of equal widths.
    pub fn new(shape: KvShape, blocks: usize) -> PageLayout {
        let (mut values, mut lists) = (0, Vec::new());
        let mut list = |width: usize| {
            lists.push(List {
                offset: values,
                width,
            });
            values += PAGE * width;
            lists.len() - 1
        };
        let (mut layers, mut rows) = (Vec::new(), Vec::new());
        for layer in &shape.0 {
            let kv: Vec<usize> = (0..blocks).map(|_| list(layer.kv / blocks)).collect();
            let key = layer.index_key.map(&mut list);
            rows.push(kv[0]..kv[0] + blocks);
            rows.extend(key.map(|key| key..key + 1));
            layers.push((kv[0], key));
        }
        PageLayout {
            shape,
            lists,
            rows,
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

    /// Block `block` of the key-values of a layer.
    pub fn kv(&self, layer: usize, block: usize) -> List {
        self.lists[self.layers[layer].0 + block]
    }

    /// The indexer's keys of a layer.
    pub fn index_keys(&self, layer: usize) -> Option<List> {
        self.layers[layer].1.map(|list| self.lists[list])
    }

    /// All lists.
    pub fn lists(&self) -> &[List] {
        &self.lists
    }

    /// Number of lists of [`KvShape::lists`].
    pub fn row_lists(&self) -> usize {
        self.rows.len()
    }

    /// The lists with the blocks of a row of list `index` of [`KvShape::lists`]; `None` where there is no such list.
    pub fn blocks(&self, index: usize) -> Option<&[List]> {
        self.rows.get(index).map(|lists| &self.lists[lists.clone()])
    }

    /// Bytes of the pages of `tokens` tokens, of which each leaves `width` values.
    pub fn bytes_for(width: usize, tokens: usize) -> u64 {
        let page = (PAGE * width * size_of::<f32>()) as u64;
        (tokens.div_ceil(PAGE) as u64).saturating_mul(page)
    }
}
