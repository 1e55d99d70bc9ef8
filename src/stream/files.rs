//! Opens the files that hold experts and lays an expert's matrices out in a slab.

use std::sync::Arc;

use colibri_ring::{DirectMode, File, Files, Layout, Range, Replica, Replicas};

use super::catalog::{Catalog, Location, Place, Projection};
use super::error::StreamError;
use super::key::ExpertKey;
use super::slots::{self, Footprint};
use crate::shards::Shards;
use crate::weight::Damage;

/// Part of a slab that holds gate and up; computing can start when it has been read.
pub(super) const GATE_UP: u8 = 0;
/// Part of a slab that holds down.
pub(super) const DOWN: u8 = 1;

/// The weight of each source of the model's replicas, of weights for the model and for each mirror.
fn source_weights(shards: &Shards, weights: &[u32]) -> Vec<u32> {
    let (model, mirrors) = weights.split_first().map_or((0, &[][..]), |(w, m)| (*w, m));
    let mut sources = vec![model; shards.dirs().len()];
    sources.extend(mirrors);
    sources
}

/// The catalogue of experts, their files, and the classes of slabs that they need.
#[derive(Debug)]
pub struct ExpertFiles {
    pub(super) files: Files,
    pub(super) catalog: Catalog,
    /// By file: the primary, and whether its experts may be zeros.
    primaries: Vec<(Arc<File>, bool)>,
    /// Largest stored size and footprint of each slab class, ascending.
    classes: Vec<(u64, Footprint)>,
}

impl ExpertFiles {
    /// Decides how each file is read and measures what slabs the experts need.
    ///
    /// # Errors
    /// When O_DIRECT is required and refused, or a tensor's place in its file is impossible.
    pub fn new(
        shards: &Shards,
        catalog: Catalog,
        direct: DirectMode,
    ) -> Result<ExpertFiles, StreamError> {
        let of_file = |(i, file): (usize, &Arc<File>)| (file.clone(), shards.is_synthetic(i));
        let primaries = shards.files().iter().enumerate().map(of_file).collect();
        ExpertFiles::of(shards.replicas(), primaries, catalog, direct)
    }

    /// As if each of `drives` drives held a copy of every file; for a simulation.
    ///
    /// # Errors
    /// When a tensor's place in its file is impossible.
    pub fn on_drives(
        shards: &Shards,
        catalog: Catalog,
        drives: usize,
    ) -> Result<ExpertFiles, StreamError> {
        let copy = |file: &Arc<File>, drive| Replica {
            drive: drive as u64,
            ..Replica::new(file.clone(), drive)
        };
        let copies = |file| (0..drives).map(|drive| copy(file, drive)).collect();
        let replicas = shards.files().iter().map(copies).collect();
        // Nothing is read: the experts are zeros.
        let primaries = (shards.files().iter())
            .map(|file| (file.clone(), true))
            .collect();
        ExpertFiles::of(replicas, primaries, catalog, DirectMode::Off)
    }

    fn of(
        replicas: Vec<Replicas>,
        primaries: Vec<(Arc<File>, bool)>,
        catalog: Catalog,
        direct: DirectMode,
    ) -> Result<ExpertFiles, StreamError> {
        let files = Files::new(replicas, direct)?;
        let mut experts = ExpertFiles {
            files,
            catalog,
            primaries,
            classes: Vec::new(),
        };
        let mut sizes = Vec::new();
        for layer in experts.catalog.layers() {
            for expert in 0..experts.catalog.experts() as u32 {
                let key = ExpertKey { layer, expert };
                sizes.push((experts.stored_bytes(key), experts.layout(key)?.footprint()));
            }
        }
        experts.classes = slots::footprints(sizes.into_iter());
        Ok(experts)
    }

    /// Fixes the ratio of the bytes that are read from each directory of the model (the first weight) and from each mirror (the
    /// others). A source of weight 0 is read only where no other copy is left.
    pub fn pin(&mut self, shards: &Shards, weights: &[u32]) {
        self.files.set_weights(source_weights(shards, weights));
    }

    /// Footprint and number of the experts of each slab class.
    pub fn footprints(&self) -> Vec<Footprint> {
        self.classes
            .iter()
            .map(|(_, footprint)| *footprint)
            .collect()
    }

    /// Bytes of an expert on average, as stored.
    pub fn mean_bytes(&self) -> f64 {
        let experts: usize = self.classes.iter().map(|(_, f)| f.experts).sum();
        let bytes = |(stored, f): &(u64, Footprint)| *stored as f64 * f.experts as f64;
        self.classes.iter().map(bytes).sum::<f64>() / experts.max(1) as f64
    }

    /// Number of layers that have experts.
    pub fn moe_layers(&self) -> usize {
        self.catalog.layers().count()
    }

    /// Alignment of reads in bytes.
    pub fn align(&self) -> u64 {
        self.files.align()
    }

    /// Files, copies and how each is read.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Where every routed expert lies, laid out as it is read.
    ///
    /// # Errors
    /// When a tensor's place in its file is impossible.
    pub fn layouts(&self) -> Result<Vec<Layout>, StreamError> {
        let experts = 0..self.catalog.experts() as u32;
        let keys = self.catalog.layers().flat_map(|layer| {
            let experts = experts.clone();
            experts.map(move |expert| ExpertKey { layer, expert })
        });
        keys.map(|key| self.layout(key)).collect()
    }

    /// Slab class of an expert.
    pub(super) fn class(&self, key: ExpertKey) -> u8 {
        let stored = self.stored_bytes(key);
        self.classes.partition_point(|(limit, _)| *limit < stored) as u8
    }

    /// The matrices of an expert of the model, in the order of [`Projection::ALL`].
    pub(super) fn matrices(&self, key: ExpertKey) -> [Location; 3] {
        let found = self.catalog.expert(key.layer, key.expert);
        found.expect("the model has the expert")
    }

    fn stored_bytes(&self, key: ExpertKey) -> u64 {
        let matrices = self.matrices(key);
        matrices.iter().map(|m| m.stored_bytes()).sum()
    }

    /// Where the matrices of an expert go in its slab: ranges [`weights_range`] and [`scales_range`].
    pub(super) fn layout(&self, key: ExpertKey) -> Result<Layout, StreamError> {
        let matrices = self.matrices(key);
        let part = |projection| match projection {
            Projection::Down => DOWN,
            Projection::Gate | Projection::Up => GATE_UP,
        };
        let range = |place: Place, projection| Range {
            file: place.file as u32,
            offset: place.offset,
            len: place.bytes,
            part: part(projection),
        };
        let mut ranges = Vec::with_capacity(2 * Projection::ALL.len());
        for projection in Projection::ALL {
            let m = &matrices[projection as usize];
            let weights = Place {
                file: m.file,
                offset: m.offset,
                bytes: m.bytes,
            };
            ranges.push(range(m.scales, projection));
            ranges.push(range(weights, projection));
        }
        self.files
            .layout(&ranges)
            .map_err(|source| StreamError::Range {
                tensor: self.tensor_at(key, None, source.offset, source.len),
                source,
            })
    }

    /// Whether a matrix may be zeros.
    pub(super) fn may_be_zeros(&self, matrix: &Location) -> bool {
        self.primaries[matrix.file].1
    }

    /// The error for an expert's matrix with this damage.
    pub(super) fn damaged(
        &self,
        key: ExpertKey,
        projection: Projection,
        found: Damage,
    ) -> StreamError {
        let location = self.matrices(key)[projection as usize];
        let (catalog, ExpertKey { layer, expert }) = (&self.catalog, key);
        let (file, tensor) = match found {
            Damage::Scale { .. } | Damage::ZeroScales { .. } => {
                let name = catalog.scales_name(layer, expert, projection);
                (location.scales.file, name)
            }
            Damage::Value { .. } | Damage::Zeros { .. } => {
                let name = catalog.tensor_name(layer, expert, projection);
                (location.file, name)
            }
        };
        StreamError::Damaged {
            file: self.primaries[file].0.path().to_path_buf(),
            tensor,
            expert,
            found,
        }
    }

    /// The tensor of an expert that overlaps a byte range of a file (or of any), for messages.
    pub(super) fn tensor_at(
        &self,
        key: ExpertKey,
        file: Option<u32>,
        offset: u64,
        len: u64,
    ) -> String {
        let matrices = self.matrices(key);
        let end = offset.saturating_add(len);
        let overlaps = |in_file: usize, start: u64, bytes: u64| {
            file.is_none_or(|file| in_file == file as usize)
                && start < end
                && offset < start.saturating_add(bytes)
        };
        for projection in Projection::ALL {
            let m = &matrices[projection as usize];
            if overlaps(m.file, m.offset, m.bytes) {
                return self.catalog.tensor_name(key.layer, key.expert, projection);
            }
            let Place {
                file,
                offset,
                bytes,
            } = m.scales;
            if overlaps(file, offset, bytes) {
                return self.catalog.scales_name(key.layer, key.expert, projection);
            }
        }
        self.catalog
            .tensor_name(key.layer, key.expert, Projection::Gate)
    }
}

/// The range of [`ExpertFiles::layout`] with the weights of a matrix.
pub(super) fn weights_range(projection: Projection) -> usize {
    2 * projection as usize + 1
}

/// The range of [`ExpertFiles::layout`] with the scales of a matrix; empty for floats.
pub(super) fn scales_range(projection: Projection) -> usize {
    2 * projection as usize
}
