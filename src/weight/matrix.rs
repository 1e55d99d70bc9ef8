//! Holds a resident weight matrix.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use colibri_ring::bulk::Region;

use super::quantised::Quantised;
use crate::quant::{Activations, Format, Matrix};

/// The bytes of all resident matrices.
#[derive(Debug)]
pub(super) struct Resident {
    pub memory: Region,
    pub ranges: Vec<Range<usize>>,
}

impl Resident {
    pub(super) fn range(&self, index: usize) -> &[u8] {
        &self.memory[self.ranges[index].clone()]
    }
}

/// A resident weight matrix [rows, cols], in the bytes it was stored in, or quantised.
#[derive(Debug)]
pub struct Weight {
    pub(super) format: Format,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) activations: Activations,
    pub(super) store: Store,
}

/// Where the bytes of a matrix are, once the loader has finished.
#[derive(Debug)]
pub(super) enum Store {
    /// As they were stored, among all others.
    Resident {
        resident: Arc<OnceLock<Resident>>,
        /// Index of its ranges in [`Resident`].
        bytes: usize,
        scales: Option<usize>,
    },
    /// Made while it was read.
    Quantised(Arc<OnceLock<Quantised>>),
}

impl Weight {
    /// The matrix, for products.
    ///
    /// # Panics
    /// Before [`Loader::finish`](super::Loader::finish).
    pub fn matrix(&self) -> Matrix<'_> {
        const FINISHED: &str = "the loader has finished";
        let (bytes, scales) = match &self.store {
            Store::Resident {
                resident,
                bytes,
                scales,
            } => {
                let resident = resident.get().expect(FINISHED);
                let scales = scales.map_or(&[][..], |range| resident.range(range));
                (resident.range(*bytes), scales)
            }
            Store::Quantised(made) => {
                let made = made.get().expect(FINISHED);
                (&made.bytes[..], &made.scales[..])
            }
        };
        Matrix::with_scales(self.format, self.rows, self.cols, bytes, scales)
            .expect("the loader has checked the sizes")
            .with_activations(self.activations)
    }
}
