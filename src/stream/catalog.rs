//! Where every routed expert lies on disk.
//!
//! A checkpoint stores experts in one of two layouts, chosen per layer:
//!
//! - *per expert*: `mlp.experts.E.{gate,up,down}_proj.weight`, one tensor an expert and matrix;
//! - *fused*: `mlp.experts.gate_up_proj` [E, 2 * moe_intermediate, hidden], gate rows first, and
//!   `mlp.experts.down_proj` [E, hidden, moe_intermediate]; an expert is a slice of each.
//!
//! Both become byte ranges of files, so that nothing after the catalog knows which one it was.

use crate::config::Config;
use crate::quant::Format;
use crate::shards::Shards;
use crate::weight::{self, WeightError};

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

/// A matrix of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// [moe_intermediate, hidden].
    Gate,
    /// [moe_intermediate, hidden].
    Up,
    /// [hidden, moe_intermediate].
    Down,
}

impl Projection {
    /// All, in the order in which an expert is computed.
    pub const ALL: [Projection; 3] = [Projection::Gate, Projection::Up, Projection::Down];

    fn name(self) -> &'static str {
        match self {
            Projection::Gate => "gate",
            Projection::Up => "up",
            Projection::Down => "down",
        }
    }
}

/// One matrix of an expert as a byte range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Index of the file in [`Shards::files`].
    pub file: usize,
    /// Absolute byte offset in that file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// How the weights are stored.
    pub format: Format,
    /// Output size.
    pub rows: usize,
    /// Input size.
    pub cols: usize,
}

/// What is kept of a [`Location`]: the rest follows from the config. 16 bytes; GLM-5.2 has 58,000.
#[derive(Clone, Copy, Debug)]
struct Entry {
    offset: u64,
    file: u32,
    format: Format,
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
    experts: usize,
    /// By layer; `None` where the MLP is dense.
    layers: Vec<Option<Layer>>,
}

impl Catalog {
    /// Finds all experts of `config`'s sparse layers. Reads nothing: offsets come from the index.
    ///
    /// # Errors
    /// The first tensor that is missing or does not fit the config, or a layer with both layouts.
    pub fn new(shards: &Shards, config: &Config) -> Result<Catalog, CatalogError> {
        let mut catalog = Catalog {
            hidden: config.hidden_size,
            intermediate: config.moe_intermediate_size,
            experts: config.n_routed_experts,
            layers: Vec::new(),
        };
        for layer in config.sparse_layers() {
            catalog.layers.resize_with(layer, || None);
            let found = catalog.find_layer(shards, layer)?;
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

    /// The matrices of an expert in the order of [`Projection::ALL`]; `None` where there is no such expert.
    pub fn expert(&self, layer: usize, expert: u32) -> Option<[Location; 3]> {
        let entries = self
            .layers
            .get(layer)?
            .as_ref()?
            .entries
            .get(expert as usize)?;
        let locate = |projection: Projection| {
            let entry = entries[projection as usize];
            let (rows, cols) = self.shape(projection);
            Location {
                file: entry.file as usize,
                offset: entry.offset,
                bytes: matrix_bytes(entry.format, rows, cols),
                format: entry.format,
                rows,
                cols,
            }
        };
        Some(Projection::ALL.map(locate))
    }

    /// The tensor that holds a matrix of an expert, for messages.
    pub fn tensor_name(&self, layer: usize, expert: u32, projection: Projection) -> String {
        match self.layers.get(layer) {
            Some(Some(Layer { fused: true, .. })) => fused_name(layer, projection),
            _ => single_name(layer, expert as usize, projection),
        }
    }

    fn shape(&self, projection: Projection) -> (usize, usize) {
        match projection {
            Projection::Gate | Projection::Up => (self.intermediate, self.hidden),
            Projection::Down => (self.hidden, self.intermediate),
        }
    }

    fn find_layer(&self, shards: &Shards, layer: usize) -> Result<Layer, CatalogError> {
        // Any tensor of a layout tells that it is meant, so that a missing one is called by the right name.
        let names = [Projection::Gate, Projection::Down].map(|p| fused_name(layer, p));
        let Some(fused) = names.into_iter().find(|name| shards.find(name).is_some()) else {
            return self.find_single(shards, layer);
        };
        let single = single_name(layer, 0, Projection::Gate);
        if shards.find(&single).is_some() {
            return Err(CatalogError::Twice {
                layer,
                fused,
                single,
            });
        }
        self.find_fused(shards, layer)
    }

    fn find_single(&self, shards: &Shards, layer: usize) -> Result<Layer, CatalogError> {
        let mut entries = Vec::new();
        for expert in 0..self.experts {
            let find = |projection| {
                let (rows, cols) = self.shape(projection);
                let name = single_name(layer, expert, projection);
                let (tensor, format) = weight::expect(shards, &name, &[rows, cols])?;
                Ok::<_, CatalogError>(Entry {
                    offset: tensor.offset,
                    file: tensor.file as u32,
                    format,
                })
            };
            let [gate, up, down] = Projection::ALL.map(find);
            entries.push([gate?, up?, down?]);
        }
        Ok(Layer {
            fused: false,
            entries: entries.into(),
        })
    }

    fn find_fused(&self, shards: &Shards, layer: usize) -> Result<Layer, CatalogError> {
        let (experts, inter, hidden) = (self.experts, self.intermediate, self.hidden);
        let gate_up_name = fused_name(layer, Projection::Gate);
        let (gate_up, gate_up_format) =
            weight::expect(shards, &gate_up_name, &[experts, 2 * inter, hidden])?;
        let down_name = fused_name(layer, Projection::Down);
        let (down, down_format) = weight::expect(shards, &down_name, &[experts, hidden, inter])?;
        // Inside the tensors, whose sizes the index has checked against their files: no overflow.
        let half = matrix_bytes(gate_up_format, inter, hidden);
        let whole = matrix_bytes(down_format, hidden, inter);
        let locate = |expert: u64| {
            let gate = Entry {
                offset: gate_up.offset + expert * 2 * half,
                file: gate_up.file as u32,
                format: gate_up_format,
            };
            let up = Entry {
                offset: gate.offset + half,
                ..gate
            };
            let down = Entry {
                offset: down.offset + expert * whole,
                file: down.file as u32,
                format: down_format,
            };
            [gate, up, down]
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

fn single_name(layer: usize, expert: usize, projection: Projection) -> String {
    let name = projection.name();
    format!("model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight")
}

fn fused_name(layer: usize, projection: Projection) -> String {
    let name = match projection {
        Projection::Gate | Projection::Up => "gate_up",
        Projection::Down => "down",
    };
    format!("model.layers.{layer}.mlp.experts.{name}_proj")
}
