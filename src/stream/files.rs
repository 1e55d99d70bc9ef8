//! The files that hold experts, and where an expert's matrices go in a slab.

use colibri_ring::extent::{Layout, Range};
use colibri_ring::replica::{DirectMode, Files, Replica};

use super::StreamError;
use super::cache::Key;
use super::catalog::{Catalog, Location, Projection};
use super::slots::{self, Footprint};
use crate::shards::Shards;

/// Part of a slab that holds gate and up; computing can start when it is in.
pub(super) const GATE_UP: u8 = 0;
/// Part of a slab that holds down.
pub(super) const DOWN: u8 = 1;

/// The catalogue of experts, the files behind it, and the classes of slabs that they need.
#[derive(Debug)]
pub struct ExpertFiles {
    pub(super) files: Files,
    pub(super) catalog: Catalog,
    /// Largest stored size and footprint of each slab class, ascending.
    classes: Vec<(u64, Footprint)>,
}

impl ExpertFiles {
    /// Decides how each file is read and measures what slabs the experts need.
    ///
    /// # Errors
    /// When O_DIRECT is insisted on and refused, or a tensor's place in its file is impossible.
    pub fn new(
        shards: &Shards,
        catalog: Catalog,
        direct: DirectMode,
    ) -> Result<ExpertFiles, StreamError> {
        let replicas = (shards.files().iter().enumerate())
            .map(|(i, file)| vec![Replica::new(file.clone(), shards.dir_of(i))])
            .collect();
        let files = Files::new(replicas, direct)?;
        let mut experts = ExpertFiles {
            files,
            catalog,
            classes: Vec::new(),
        };
        let mut sizes = Vec::new();
        for layer in experts.catalog.layers() {
            for expert in 0..experts.catalog.experts() as u32 {
                let key = Key { layer, expert };
                sizes.push((experts.stored_bytes(key), experts.layout(key)?.footprint));
            }
        }
        experts.classes = slots::footprints(sizes.into_iter());
        Ok(experts)
    }

    /// Footprint and number of the experts of each slab class.
    pub fn footprints(&self) -> Vec<Footprint> {
        self.classes
            .iter()
            .map(|(_, footprint)| *footprint)
            .collect()
    }

    /// Number of layers that have experts.
    pub fn moe_layers(&self) -> usize {
        self.catalog.layers().count()
    }

    /// Whether every read bypasses the page cache.
    pub fn direct(&self) -> bool {
        self.files.all_direct()
    }

    /// Alignment of reads in bytes.
    pub fn align(&self) -> u64 {
        self.files.align()
    }

    /// Slab class of an expert.
    pub(super) fn class(&self, key: Key) -> u8 {
        let stored = self.stored_bytes(key);
        self.classes.partition_point(|(limit, _)| *limit < stored) as u8
    }

    /// The matrices of an expert of the model, in the order of [`Projection::ALL`].
    pub(super) fn matrices(&self, key: Key) -> [Location; 3] {
        let found = self.catalog.expert(key.layer, key.expert);
        found.expect("only experts of the model are asked for")
    }

    fn stored_bytes(&self, key: Key) -> u64 {
        self.matrices(key).iter().map(|m| m.bytes).sum()
    }

    /// Where the matrices of an expert go in its slab, in the order of [`Projection::ALL`].
    pub(super) fn layout(&self, key: Key) -> Result<Layout, StreamError> {
        let matrices = self.matrices(key);
        let ranges = Projection::ALL.map(|projection| {
            let Location {
                file,
                offset,
                bytes,
                ..
            } = matrices[projection as usize];
            let part = if projection == Projection::Down {
                DOWN
            } else {
                GATE_UP
            };
            Range {
                file: file as u32,
                offset,
                len: bytes,
                part,
            }
        });
        Layout::new(&ranges, self.align()).map_err(|source| StreamError::Range {
            tensor: self.tensor_at(key, ranges[0].file, source.offset, source.len),
            source,
        })
    }

    /// The tensor of an expert that overlaps a byte range of a file, for messages.
    pub(super) fn tensor_at(&self, key: Key, file: u32, offset: u64, len: u64) -> String {
        let matrices = self.matrices(key);
        let overlaps = |projection: &Projection| {
            let m = &matrices[*projection as usize];
            let end = offset.saturating_add(len);
            m.file == file as usize && m.offset < end && offset < m.offset + m.bytes
        };
        let projection = Projection::ALL
            .into_iter()
            .find(overlaps)
            .unwrap_or(Projection::Gate);
        self.catalog.tensor_name(key.layer, key.expert, projection)
    }
}
