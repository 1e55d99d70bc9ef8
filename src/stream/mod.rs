//! The expert store: which experts are in memory, which are being read, and which come next.

pub mod catalog;

use std::sync::Arc;

use colibri_ring::file::{File, FileError};

use crate::quant::Matrix;
use catalog::{Catalog, Projection};

/// Why an expert is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The router chose it: the layer cannot finish without it.
    Demand,
    /// The router of a later layer will probably choose it.
    Hint,
}

/// A piece of a demanded expert that is in memory and can be computed now.
#[derive(Debug)]
pub enum Ready<'a> {
    /// The gate and up matrices, [moe_intermediate, hidden] each.
    GateUp {
        /// Expert id.
        expert: u32,
        /// Gate projection.
        gate: Matrix<'a>,
        /// Up projection.
        up: Matrix<'a>,
    },
    /// The down matrix, [hidden, moe_intermediate]. Always after the expert's `GateUp`.
    Down {
        /// Expert id.
        expert: u32,
        /// Down projection.
        down: Matrix<'a>,
    },
}

/// Why an expert could not be had.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// A read failed.
    #[error("expert {expert} of layer {layer}, tensor {tensor}: {source}")]
    Read {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// The tensor.
        tensor: String,
        /// What went wrong, with file and offset.
        source: FileError,
    },
    /// There is no such expert.
    #[error("layer {layer} has no expert {expert}")]
    Unknown {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
    },
}

/// The expert store. This one reads an expert when it is handed out, keeps none, and ignores hints.
#[derive(Debug)]
pub struct ExpertStore {
    files: Vec<Arc<File>>,
    catalog: Catalog,
    layer: usize,
    /// Demanded and not yet handed out, the next one last.
    queue: Vec<u32>,
    /// The matrices of the expert at the end of the queue, read when its gate and up were handed out.
    current: Option<[Vec<u8>; 3]>,
    /// The down matrix that was handed out last.
    finished: Vec<u8>,
}

impl ExpertStore {
    /// A store over the files of the index that `catalog` was made from.
    pub fn new(files: Vec<Arc<File>>, catalog: Catalog) -> ExpertStore {
        ExpertStore {
            files,
            catalog,
            layer: 0,
            queue: Vec::new(),
            current: None,
            finished: Vec::new(),
        }
    }

    /// Asks for the experts `ids` (ascending, distinct) of `layer`. After a `Demand`, call [`ExpertStore::next`] until
    /// it returns `None` before the next `Demand`. `ids` may be more than there are slabs.
    pub fn want(&mut self, layer: usize, ids: &[u32], want: Want) {
        if want == Want::Demand {
            self.layer = layer;
            self.queue.clear();
            self.queue.extend(ids.iter().rev());
            self.current = None;
        }
    }

    /// The next piece of the demanded experts that can be computed, resident experts first; blocks until
    /// there is one; `None` when all demanded experts have been handed out. The borrow ends before the
    /// next call, which also frees the slab of a finished expert for reuse.
    ///
    /// # Errors
    /// When a read failed on every copy: names tensor, file and offset.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Ready<'_>>, StreamError> {
        let Some(&expert) = self.queue.last() else {
            return Ok(None);
        };
        let layer = self.layer;
        let places = self
            .catalog
            .expert(layer, expert)
            .ok_or(StreamError::Unknown { layer, expert })?;
        let view = |i: usize, bytes| Matrix {
            format: places[i].format,
            rows: places[i].rows,
            cols: places[i].cols,
            bytes,
        };
        if let Some([_, _, down]) = self.current.take() {
            self.queue.pop();
            self.finished = down;
            let down = view(2, &self.finished);
            return Ok(Some(Ready::Down { expert, down }));
        }
        let bytes = read(&self.files, &self.catalog, layer, expert)?;
        let [gate, up, _] = &*self.current.insert(bytes);
        let (gate, up) = (view(0, gate), view(1, up));
        Ok(Some(Ready::GateUp { expert, gate, up }))
    }
}

fn read(
    files: &[Arc<File>],
    catalog: &Catalog,
    layer: usize,
    expert: u32,
) -> Result<[Vec<u8>; 3], StreamError> {
    let places = catalog
        .expert(layer, expert)
        .ok_or(StreamError::Unknown { layer, expert })?;
    let mut out = [const { Vec::new() }; 3];
    for (i, projection) in Projection::ALL.into_iter().enumerate() {
        out[i] = vec![0; places[i].bytes as usize];
        files[places[i].file]
            .read_at(&mut out[i], places[i].offset)
            .map_err(|source| StreamError::Read {
                layer,
                expert,
                tensor: catalog.tensor_name(layer, expert, projection),
                source,
            })?;
    }
    Ok(out)
}
