//! Locates every routed expert on disk.
//!
//! A checkpoint stores experts in one of two layouts, chosen per layer:
//!
//! - *per expert*: one tensor an expert and matrix;
//! - *fused*: gates and ups of all experts in one tensor [experts, 2 * width, hidden], gate rows first, and downs in another
//!   [experts, hidden, width]; an expert is a slice of each.
//!
//! In families with pairs of gate and up, the gate is both, and up has no rows. These are fused always; floats of them are stored by
//! inputs, [experts, hidden, 2 * width] and [experts, width, hidden], and codes by outputs.
//!
//!
//! Both become byte ranges of files, so that nothing after the catalog knows which one it was. A matrix of codes has a
//! second range, that of its scales.

use crate::arch::{Architecture, Names, TensorId};
use crate::quant::Format;
use crate::shards::Shards;
use crate::weight::{Matrices, Stored, WeightError, codes_name, is_stored, scales_name};

pub use crate::arch::Projection;

/// Why the experts of a model cannot be catalogued.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// A tensor is missing, or has the wrong shape or type.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// Both layouts are there, and they may differ.
    #[error(
        "layer {layer} has its experts twice, as {fused} and one by one ({single}): remove one of them"
    )]
    Twice {
        /// The layer.
        layer: usize,
        /// A tensor of the fused layout.
        fused: String,
        /// A tensor of the other one.
        single: String,
    },
}

/// A byte range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the file in [`Shards::files`].
    pub file: usize,
    /// Absolute byte offset in that file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// One matrix of an expert as byte ranges of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Index of the file in [`Shards::files`].
    pub file: usize,
    /// Absolute byte offset in that file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Where its scales are; of length 0 for floats.
    pub scales: Place,
    /// How the weights are stored.
    pub format: Format,
    /// Output size.
    pub rows: usize,
    /// Input size.
    pub cols: usize,
}

impl Location {
    /// Bytes of the weights and their scales.
    pub fn stored_bytes(&self) -> u64 {
        self.bytes + self.scales.bytes
    }
}

/// What is kept of a [`Location`]: the rest follows from the config. 32 bytes; GLM-5.2 has 58,000.
#[derive(Clone, Copy, Debug)]
struct Entry {
    offset: u64,
    scales: u64,
    file: u32,
    scales_file: u32,
    format: Format,
}

impl Entry {
    /// The matrix of `rows` rows of `cols` that starts at row `first` of what is stored.
    fn of(stored: &Stored<'_>, first: u64, cols: usize) -> Entry {
        let format = stored.format;
        // Inside the tensors, whose sizes the index has checked against their files: no overflow.
        let row = matrix_bytes(format, 1, cols);
        let scale_row = format.scale_row_bytes(cols).unwrap_or(usize::MAX) as u64;
        let (scales, scales_file) = match &stored.scales {
            // Only whole tensors are FP8, where the scales are not those of rows.
            Some(scales) => (scales.offset + first * scale_row, scales.file),
            None => (0, stored.tensor.file),
        };
        Entry {
            offset: stored.tensor.offset + first * row,
            scales,
            file: stored.tensor.file as u32,
            scales_file: scales_file as u32,
            format,
        }
    }
}

/// The experts of one layer.
#[derive(Debug)]
struct Layer {
    fused: bool,
    /// [expert][gate, up, down].
    entries: Box<[[Entry; 3]]>,
}

/// The byte ranges of every routed expert of a model.
#[derive(Debug)]
pub struct Catalog {
    hidden: usize,
    intermediate: usize,
    /// Whether rows of gate and up alternate.
    pairs: bool,
    experts: usize,
    names: Names,
    /// By layer; `None` where the MLP is dense.
    layers: Vec<Option<Layer>>,
}

impl Catalog {
    /// Finds all experts of the used sparse layers. Reads nothing: offsets come from the index.
    ///
    /// # Errors
    /// The first tensor that is missing or does not fit the architecture, or a layer with both layouts.
    pub fn new(shards: &Shards, arch: &Architecture) -> Result<Catalog, CatalogError> {
        Catalog::of_layers(shards, arch, arch.sparse_layers())
    }

    /// As [`Catalog::new`], of the given layers, ascending.
    ///
    /// # Errors
    /// As [`Catalog::new`].
    pub fn of_layers(
        shards: &Shards,
        arch: &Architecture,
        layers: impl IntoIterator<Item = usize>,
    ) -> Result<Catalog, CatalogError> {
        let mut catalog = Catalog {
            hidden: arch.hidden_size,
            intermediate: arch.experts.width,
            pairs: arch.experts.in_pairs(),
            experts: arch.experts.count,
            names: arch.names,
            layers: Vec::new(),
        };
        let matrices = Matrices::new(shards)?;
        for layer in layers {
            catalog.layers.resize_with(layer, || None);
            let found = catalog.find_layer(shards, &matrices, layer)?;
            catalog.layers.push(Some(found));
        }
        Ok(catalog)
    }

    /// Number of routed experts of a sparse layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// The layers that have routed experts, ascending.
    pub fn layers(&self) -> impl Iterator<Item = usize> + '_ {
        let sparse = |(i, layer): (usize, &Option<Layer>)| layer.as_ref().map(|_| i);
        self.layers.iter().enumerate().filter_map(sparse)
    }

    /// The matrices of an expert in the order of [`Projection::ALL`]; `None` for an expert that does not exist.
    pub fn expert(&self, layer: usize, expert: u32) -> Option<[Location; 3]> {
        let entries = self
            .layers
            .get(layer)?
            .as_ref()?
            .entries
            .get(expert as usize)?;
        let locate = |projection: Projection| {
            let entry = entries[projection as usize];
            let (rows, cols) = self.shape(projection, entry.format);
            Location {
                file: entry.file as usize,
                offset: entry.offset,
                bytes: matrix_bytes(entry.format, rows, cols),
                scales: Place {
                    file: entry.scales_file as usize,
                    offset: entry.scales,
                    bytes: entry.format.scale_bytes(rows, cols).unwrap_or(usize::MAX) as u64,
                },
                format: entry.format,
                rows,
                cols,
            }
        };
        Some(Projection::ALL.map(locate))
    }

    /// The tensor that holds a matrix of an expert, for messages.
    pub fn tensor_name(&self, layer: usize, expert: u32, projection: Projection) -> String {
        let name = self.matrix_name(layer, expert, projection);
        match self.format(layer, expert, projection) {
            Some(format) => codes_name(format, name),
            None => name,
        }
    }

    /// The name of the matrix, or of the stack that has it.
    fn matrix_name(&self, layer: usize, expert: u32, projection: Projection) -> String {
        self.names.name(match self.layers.get(layer) {
            Some(Some(Layer { fused: true, .. })) => match projection {
                Projection::Gate | Projection::Up => TensorId::FusedGateUp(layer),
                Projection::Down => TensorId::FusedDown(layer),
            },
            _ => TensorId::Expert(layer, expert, projection),
        })
    }

    fn format(&self, layer: usize, expert: u32, projection: Projection) -> Option<Format> {
        let matrices = self.expert(layer, expert);
        matrices.map(|m| m[projection as usize].format)
    }

    /// The tensor that holds the scales of a matrix of an expert, for messages; the matrix itself where it has none.
    pub fn scales_name(&self, layer: usize, expert: u32, projection: Projection) -> String {
        let name = self.matrix_name(layer, expert, projection);
        self.format(layer, expert, projection)
            .and_then(|format| scales_name(format, &name))
            .unwrap_or(name)
    }

    /// Rows and columns of a matrix of an expert as it is stored.
    fn shape(&self, projection: Projection, format: Format) -> (usize, usize) {
        if !self.pairs {
            return self.single_shape(projection);
        }
        let (outputs, inputs) = match projection {
            Projection::Gate => (2 * self.intermediate, self.hidden),
            Projection::Up => return (0, self.hidden),
            Projection::Down => (self.hidden, self.intermediate),
        };
        match format.is_floating() {
            true => (inputs, outputs),
            false => (outputs, inputs),
        }
    }

    fn single_shape(&self, projection: Projection) -> (usize, usize) {
        match projection {
            Projection::Gate | Projection::Up => (self.intermediate, self.hidden),
            Projection::Down => (self.hidden, self.intermediate),
        }
    }

    fn find_layer(
        &self,
        shards: &Shards,
        matrices: &Matrices<'_>,
        layer: usize,
    ) -> Result<Layer, CatalogError> {
        // Any tensor of a layout tells that it is meant, so that a missing one is called by the right name.
        let names = [TensorId::FusedGateUp(layer), TensorId::FusedDown(layer)];
        let names = names.map(|id| self.names.name(id));
        let fused = names.iter().find(|name| is_stored(shards, name));
        let Some(fused) = fused.cloned() else {
            return match self.pairs {
                // The error names the first of them.
                true => self.find_pairs(matrices, layer),
                false => self.find_single(matrices, layer),
            };
        };
        let single = TensorId::Expert(layer, 0, Projection::Gate);
        let single = self.names.name(single);
        if !self.pairs && shards.find(&single).is_some() {
            return Err(CatalogError::Twice {
                layer,
                fused,
                single,
            });
        }
        match self.pairs {
            true => self.find_pairs(matrices, layer),
            false => self.find_fused(matrices, layer),
        }
    }

    fn find_single(&self, matrices: &Matrices<'_>, layer: usize) -> Result<Layer, CatalogError> {
        let mut entries = Vec::new();
        for expert in 0..self.experts as u32 {
            let find = |projection| {
                let (rows, cols) = self.single_shape(projection);
                let name = self.names.name(TensorId::Expert(layer, expert, projection));
                let stored = matrices.find(&name, &[rows, cols])?;
                Ok::<_, CatalogError>(Entry::of(&stored, 0, cols))
            };
            let [gate, up, down] = Projection::ALL.map(find);
            entries.push([gate?, up?, down?]);
        }
        Ok(Layer {
            fused: false,
            entries: entries.into(),
        })
    }

    fn find_fused(&self, matrices: &Matrices<'_>, layer: usize) -> Result<Layer, CatalogError> {
        let (experts, inter, hidden) = (self.experts, self.intermediate, self.hidden);
        let name = self.names.name(TensorId::FusedGateUp(layer));
        let gate_up = matrices.find(&name, &[experts, 2 * inter, hidden])?;
        let name = self.names.name(TensorId::FusedDown(layer));
        let down = matrices.find(&name, &[experts, hidden, inter])?;
        let locate = |expert: u64| {
            let gate = 2 * expert * inter as u64;
            [
                Entry::of(&gate_up, gate, hidden),
                Entry::of(&gate_up, gate + inter as u64, hidden),
                Entry::of(&down, expert * hidden as u64, inter),
            ]
        };
        Ok(Layer {
            fused: true,
            entries: (0..experts as u64).map(locate).collect(),
        })
    }
}

impl Catalog {
    fn find_pairs(&self, matrices: &Matrices<'_>, layer: usize) -> Result<Layer, CatalogError> {
        let (experts, inter, hidden) = (self.experts, self.intermediate, self.hidden);
        let name = self.names.name(TensorId::FusedGateUp(layer));
        let gate_up = matrices.find_in_pairs(&name, [experts, 2 * inter, hidden])?;
        let name = self.names.name(TensorId::FusedDown(layer));
        let down = matrices.find_in_pairs(&name, [experts, hidden, inter])?;
        let locate = |expert: u64| {
            let of = |stored: &Stored<'_>, projection| {
                let (rows, cols) = self.shape(projection, stored.format);
                Entry::of(stored, expert * rows as u64, cols)
            };
            let both = of(&gate_up, Projection::Gate);
            [both, both, of(&down, Projection::Down)]
        };
        Ok(Layer {
            fused: true,
            entries: (0..experts as u64).map(locate).collect(),
        })
    }
}

/// Bytes of a matrix. The config bounds the dimensions so that this does not overflow.
fn matrix_bytes(format: Format, rows: usize, cols: usize) -> u64 {
    let bytes = format.row_bytes(cols).and_then(|row| row.checked_mul(rows));
    bytes.unwrap_or(usize::MAX) as u64
}
