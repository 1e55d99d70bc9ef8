//! Loads resident weights: finds and checks every tensor, then reads all matrices at once, by large direct reads into one
//! piece of memory on huge pages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use colibri_ring::bulk;
use colibri_ring::bulk::{HUGE_PAGE, Region, SLAB_ALIGN};
use colibri_ring::extent::{self};

use super::damage::{self, Zeros};
use super::error::WeightError;
use super::matrix::{Resident, Store, Weight};
use super::quantised::{self, Plan, packed_bytes};
use super::role::{Role, activations_of, role};
use super::seen::{Digest, Seen};
use super::stored::{Matrices, floats};
use crate::arch::{Architecture, Part, Shape, TensorId};
use crate::pool::Pool;
use crate::quant::encode::Packing;
use crate::quant::{Activations, Format};
use crate::shards::{Cache, Dtype, Shards, Tensor};

/// A tensor that is going to be read.
#[derive(Debug)]
struct Wanted {
    name: String,
    /// How the matrix is stored; `None` for scales.
    format: Option<Format>,
    range: extent::Range,
    /// How many zeros it may have.
    zeros: Zeros,
    /// Whether it counts for the digest.
    counts: bool,
    seen: Seen,
}

/// Finds resident weights, then reads them all.
#[derive(Debug)]
pub struct Loader<'a> {
    shards: &'a Shards,
    arch: &'a Architecture,
    matrices: Matrices<'a>,
    wanted: Vec<Wanted>,
    resident: Arc<OnceLock<Resident>>,
    /// What float and FP8 matrices become, and on how many threads.
    dense: Option<(Packing, usize)>,
    /// How products take activations, where they may be rounded.
    activations: Activations,
    /// The matrices that are quantised on the way.
    quantised: Vec<Plan<'a>>,
    /// Of the vectors.
    /// `None` where nothing is summed up.
    digest: Option<Digest>,
    bytes: u64,
}

impl<'a> Loader<'a> {
    /// A loader of weights of `arch` that has loaded nothing yet.
    ///
    /// # Errors
    /// A malformed stamp of formats.
    pub fn new(shards: &'a Shards, arch: &'a Architecture) -> Result<Loader<'a>, WeightError> {
        Ok(Loader {
            shards,
            arch,
            matrices: Matrices::new(shards)?,
            wanted: Vec::new(),
            resident: Arc::default(),
            dense: None,
            activations: Activations::Exact,
            quantised: Vec::new(),
            digest: None,
            bytes: 0,
        })
    }

    /// Quantises float and FP8 matrices as they are read, on `threads` threads: see [`super::packing_of`].
    #[must_use]
    pub fn quantising(mut self, dense: Packing, threads: usize) -> Loader<'a> {
        self.dense = Some((dense, threads));
        self
    }

    /// Sums up what is read, for the digest.
    #[must_use]
    pub fn digesting(mut self) -> Loader<'a> {
        self.digest = Some(Digest::default());
        self
    }

    /// Makes matrices whose products take activations this way: see [`super::activations_of`].
    #[must_use]
    pub fn multiplying(mut self, activations: Activations) -> Loader<'a> {
        self.activations = activations;
        self
    }

    /// Bytes of everything asked for so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The matrices that were asked for, and how they are stored.
    pub fn formats(&self) -> impl Iterator<Item = (&str, Format)> {
        let wanted = self.wanted.iter();
        wanted.filter_map(|wanted| Some((wanted.name.as_str(), wanted.format?)))
    }

    /// The architecture whose weights are loaded.
    pub fn arch(&self) -> &'a Architecture {
        self.arch
    }

    /// Whether the checkpoint has the tensor.
    pub fn has(&self, id: TensorId) -> bool {
        self.shards.find(&self.arch.name(id)).is_some()
    }

    /// A matrix in its stored width, or quantised. It can be used after [`Loader::finish`], which checks its values.
    ///
    /// # Errors
    /// Those of [`Matrices::find`].
    ///
    /// # Panics
    /// When the architecture does not have the matrix.
    pub fn matrix(&mut self, id: TensorId) -> Result<Weight, WeightError> {
        let Some(Shape::Matrix(rows, cols)) = self.arch.shape(id) else {
            panic!("{id:?} is no matrix of the architecture");
        };
        let stored = self.matrices.find(&self.arch.name(id), &[rows, cols])?;
        let activations = activations_of(id, self.activations);
        let checks = (self.zeros(id, &stored.tensor), self.counts(id));
        if let Some((dense, _)) = self.dense
            && let Some(plan) = Plan::new(id, stored, rows, cols, dense, checks)
        {
            self.bytes += plan.bytes();
            let weight = Weight {
                format: plan.format(),
                rows,
                cols,
                activations,
                store: Store::Quantised(plan.result()),
            };
            self.quantised.push(plan);
            return Ok(weight);
        }
        let store = Store::Resident {
            resident: self.resident.clone(),
            bytes: self.want(id, &stored.tensor, Some(stored.format)),
            scales: (stored.scales).map(|scales| self.want(id, &scales, stored.format_of_scales())),
        };
        Ok(Weight {
            format: stored.format,
            rows,
            cols,
            activations,
            store,
        })
    }

    fn want(&mut self, id: TensorId, tensor: &Tensor<'_>, format: Option<Format>) -> usize {
        self.bytes += tensor.bytes;
        self.wanted.push(Wanted {
            name: tensor.name.to_owned(),
            format,
            range: range(tensor),
            zeros: self.zeros(id, tensor),
            counts: self.counts(id),
            seen: Seen::new(self.digest.is_some()),
        });
        self.wanted.len() - 1
    }

    /// How many zeros a matrix may have.
    fn zeros(&self, id: TensorId, tensor: &Tensor<'_>) -> Zeros {
        match role(id) {
            _ if self.shards.is_synthetic(tensor.file) => Zeros::Any,
            Role::Embedding => Zeros::Rows,
            Role::Router | Role::Dense => Zeros::Few,
        }
    }

    /// Whether the values of a tensor count for the digest: those of the prediction layer change no row of the others.
    fn counts(&self, id: TensorId) -> bool {
        (id.layer()).is_none_or(|layer| layer < self.arch.num_hidden_layers())
    }

    /// A vector as f32: a norm, a bias. Read at once: these are small.
    ///
    /// # Errors
    /// When it is missing, has another shape, is not of floats, has one that is infinite or NaN, or cannot be read.
    ///
    /// # Panics
    /// When the architecture does not have the vector.
    pub fn vector(&mut self, id: TensorId) -> Result<Vec<f32>, WeightError> {
        let Some(Shape::Vector(len)) = self.arch.shape(id) else {
            panic!("{id:?} is no vector of the architecture");
        };
        let name = self.arch.name(id);
        let tensor = self.shards.get(&name)?;
        let located = |error: WeightError| error.in_file(self.shards, tensor.file);
        floats(&tensor, &[len]).map_err(located)?;
        let values = self.shards.read_f32(&name, Cache::Drop)?;
        self.bytes += 4 * values.len() as u64;
        let damage = |found| {
            located(WeightError::Damaged {
                name: name.clone(),
                found,
            })
        };
        let bytes = bytemuck::cast_slice(&values);
        damage::check(bytes, Some(Format::F32), Zeros::Any).map_err(damage)?;
        let counts = self.counts(id);
        let norm = id == TensorId::Norm || id.part().is_some_and(Part::is_norm);
        if norm && !values.is_empty() && values.iter().all(|value| *value == 0.0) {
            return Err(located(WeightError::ZeroNorm { name, of: len }));
        }
        if let Some(digest) = self.digest.as_mut().filter(|_| counts) {
            digest.add(&name, crc32fast::hash(bytes));
        }
        Ok(values)
    }

    /// Reads every matrix that was asked for, around the page cache if `direct`. `progress` is called with (bytes so far, bytes
    /// in all). The threads that read sum up and check what arrives. Returns the digest of all vectors and matrices, those of the
    /// prediction layer excepted, after [`Loader::digesting`].
    ///
    /// # Errors
    /// No memory, a failing read, values that are infinite or NaN, and more zeros than a model has.
    pub fn finish(
        mut self,
        direct: bool,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Option<u32>, WeightError> {
        let files = self.shards.replicas();
        let ranges: Vec<_> = self.wanted.iter().map(|wanted| wanted.range).collect();
        let layout = bulk::layout(&files, &ranges).map_err(|source| {
            let at = |wanted: &&Wanted| wanted.range.offset == source.offset;
            WeightError::Place {
                name: self.name(at),
                source,
            }
        })?;
        let footprint = layout.footprint();
        let bytes = usize::try_from(footprint).unwrap_or(usize::MAX);
        // Where everything is quantised, nothing may be left.
        let mut memory = Region::map(bytes.max(1)).map_err(|source| WeightError::Memory {
            bytes: footprint,
            source,
        })?;
        let floats: u64 = self.quantised.iter().map(Plan::bytes_to_read).sum();
        let total = footprint.saturating_add(floats);
        let done = AtomicU64::new(0);
        let heard = |n| progress(done.fetch_add(n, Ordering::Relaxed) + n, total);
        let places = layout.places();
        let mut order: Vec<usize> = (0..places.len()).collect();
        order.sort_by_key(|i| (places[*i], ranges[*i].len));
        let arrived = |at: usize, piece: &[u8]| {
            let (start, end) = (at as u64, (at + piece.len()) as u64);
            let first = order.partition_point(|i| places[*i] + ranges[*i].len <= start);
            for &i in &order[first..] {
                let (from, to) = (places[i], places[i] + ranges[i].len);
                if from >= end {
                    break;
                }
                let (cut, until) = (start.max(from), end.min(to));
                if cut < until {
                    let piece = &piece[(cut - start) as usize..(until - start) as usize];
                    let wanted = &self.wanted[i];
                    wanted.seen.look(wanted.format, cut - from, piece);
                }
            }
            heard(piece.len() as u64);
        };
        bulk::read(&files, &layout, direct, &mut memory, &arrived).map_err(|source| {
            let at = |wanted: &&Wanted| wanted.overlaps(source.file, source.offset);
            WeightError::Read {
                name: self.name(at),
                source,
            }
        })?;
        let places = layout.places().iter().zip(&ranges);
        let resident = Resident {
            ranges: places
                .map(|(at, range)| *at as usize..(*at + range.len) as usize)
                .collect(),
            memory,
        };
        for (i, wanted) in self.wanted.iter_mut().enumerate() {
            let seen = std::mem::take(&mut wanted.seen);
            if seen.is_suspicious() {
                let checked = damage::check(resident.range(i), wanted.format, wanted.zeros);
                checked.map_err(|found| {
                    let name = wanted.name.clone();
                    let file = wanted.range.file as usize;
                    WeightError::Damaged { name, found }.in_file(self.shards, file)
                })?;
            }
            if let Some(digest) = self.digest.as_mut().filter(|_| wanted.counts) {
                digest.add(&wanted.name, seen.total());
            }
        }
        if let Some((_, threads)) = self.dense {
            let pool = Pool::new(threads);
            let (plans, digest) = (&self.quantised, self.digest.as_mut());
            quantised::read(self.shards, &pool, plans, &heard, digest)?;
        }
        // Set once: a loader finishes once.
        let _ = self.resident.set(resident);
        Ok(self.digest.map(|digest| digest.total()))
    }

    /// The name of the first tensor for which `found` holds, for messages.
    fn name(&self, found: impl Fn(&&Wanted) -> bool) -> String {
        let wanted = self.wanted.iter().find(found);
        wanted.map(|wanted| wanted.name.clone()).unwrap_or_default()
    }
}

impl Wanted {
    /// Whether a read that failed at `offset`, rounded down to the alignment, was one for this tensor.
    fn overlaps(&self, file: u32, offset: u64) -> bool {
        let extent::Range {
            offset: start, len, ..
        } = self.range;
        self.range.file == file && offset < start + len && start < offset + SLAB_ALIGN as u64
    }
}

fn range(tensor: &Tensor<'_>) -> extent::Range {
    extent::Range {
        file: tensor.file as u32,
        offset: tensor.offset,
        len: tensor.bytes,
        part: 0,
    }
}

/// Bytes of memory that the resident tensors among `tensors` take: vectors as f32, matrices as they are stored, in the
/// aligned pieces that they are read by, or as what float and FP8 matrices become when `dense` is given.
pub fn resident_bytes<'t>(
    shards: &Shards,
    arch: &Architecture,
    tensors: impl Iterator<Item = Tensor<'t>>,
    dense: Option<Packing>,
) -> u64 {
    let (mut vectors, mut ranges) = (0u64, Vec::new());
    for tensor in tensors {
        if let Some(bytes) = dense.and_then(|dense| packed_bytes(shards, arch, &tensor, dense)) {
            vectors = vectors.saturating_add(bytes);
            continue;
        }
        let is_float = matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
        if tensor.shape.len() == 1 && is_float && !tensor.name.ends_with(".qs") {
            vectors = vectors.saturating_add(tensor.elements().saturating_mul(4));
        } else {
            ranges.push(range(&tensor));
        }
    }
    // What cannot be laid out cannot be loaded either, and loading says why.
    let laid_out = bulk::layout(&shards.replicas(), &ranges);
    let footprint = laid_out.map_or(u64::MAX, |layout| layout.footprint());
    let pages = footprint.checked_next_multiple_of(HUGE_PAGE as u64);
    vectors.saturating_add(pages.unwrap_or(u64::MAX))
}
