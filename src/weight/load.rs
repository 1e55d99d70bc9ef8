//! Loads resident weights: finds and checks every tensor, then reads all matrices at once, by large direct reads into one
//! piece of memory on huge pages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use colibri_ring::bulk;
use colibri_ring::bulk::{HUGE_PAGE, Region, SLAB_ALIGN};
use colibri_ring::extent::{self};

use super::error::WeightError;
use super::matrix::{Resident, Store, Weight};
use super::quantised::{self, Plan, packed_bytes};
use super::role::{Role, activations_of, role};
use super::stored::{Matrices, floats};
use crate::arch::{Architecture, Shape, TensorId};
use crate::pool::Pool;
use crate::quant::encode::Packing;
use crate::quant::infer::not_finite;
use crate::quant::{Activations, Format};
use crate::shards::{Cache, Dtype, Shards, Tensor};

/// What must hold of the bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    Nothing,
    /// Scales that are numbers.
    Scales,
    /// Values of this format that are numbers.
    Values(Format),
}

/// A tensor that is going to be read.
#[derive(Debug)]
struct Wanted {
    name: String,
    /// How the matrix is stored; `None` for scales.
    format: Option<Format>,
    range: extent::Range,
    check: Check,
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
            bytes: 0,
        })
    }

    /// Quantises float and FP8 matrices as they are read, on `threads` threads: see [`super::packing_of`].
    #[must_use]
    pub fn quantising(mut self, dense: Packing, threads: usize) -> Loader<'a> {
        self.dense = Some((dense, threads));
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

    /// A matrix in its stored width, or quantised. It can be used after [`Loader::finish`], which refuses a router whose floats
    /// are infinite or NaN.
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
        if let Some((dense, _)) = self.dense
            && let Some(plan) = Plan::new(id, stored, rows, cols, dense)
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
        let check = match role(id) {
            Role::Router => Check::Values(stored.format),
            _ => Check::Nothing,
        };
        let store = Store::Resident {
            resident: self.resident.clone(),
            bytes: self.want(&stored.tensor, Some(stored.format), check),
            scales: stored
                .scales
                .map(|scales| self.want(&scales, None, Check::Scales)),
        };
        Ok(Weight {
            format: stored.format,
            rows,
            cols,
            activations,
            store,
        })
    }

    fn want(&mut self, tensor: &Tensor<'_>, format: Option<Format>, check: Check) -> usize {
        self.bytes += tensor.bytes;
        self.wanted.push(Wanted {
            name: tensor.name.to_owned(),
            format,
            range: range(tensor),
            check,
        });
        self.wanted.len() - 1
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
        floats(&self.shards.get(&name)?, &[len])?;
        let values = self.shards.read_f32(&name, Cache::Drop)?;
        self.bytes += 4 * values.len() as u64;
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(WeightError::Value {
                name,
                index,
                value: values[index],
            });
        }
        Ok(values)
    }

    /// Reads every matrix that was asked for, around the page cache if `direct`. `progress` is called with (bytes so far, bytes
    /// in all).
    ///
    /// # Errors
    /// No memory, a failing read, scales, checked values or weights to be quantised that are infinite or NaN.
    pub fn finish(
        self,
        direct: bool,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), WeightError> {
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
        bulk::read(&files, &layout, direct, &mut memory, &heard).map_err(|source| {
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
        for (i, wanted) in self.wanted.iter().enumerate() {
            wanted.check(resident.range(i))?;
        }
        if let Some((_, threads)) = self.dense {
            quantised::read(self.shards, &Pool::new(threads), &self.quantised, &heard)?;
        }
        // Set once: a loader finishes once.
        let _ = self.resident.set(resident);
        Ok(())
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

    fn check(&self, bytes: &[u8]) -> Result<(), WeightError> {
        let name = || self.name.clone();
        match self.check {
            Check::Nothing => Ok(()),
            Check::Scales => match not_finite(bytes) {
                None => Ok(()),
                Some((index, value)) => Err(WeightError::Scale {
                    name: name(),
                    index,
                    value,
                }),
            },
            Check::Values(format) => {
                let halves = || {
                    let words = bytes.chunks_exact(2);
                    words.map(|b| u16::from_le_bytes([b[0], b[1]]))
                };
                let found = match format {
                    Format::F32 => not_finite(bytes),
                    Format::Bf16 => {
                        first_not_finite(halves().map(|h| half::bf16::from_bits(h).to_f32()))
                    }
                    Format::F16 => {
                        first_not_finite(halves().map(|h| half::f16::from_bits(h).to_f32()))
                    }
                    // Codes are numbers, and their scales are checked.
                    _ => None,
                };
                match found {
                    None => Ok(()),
                    Some((index, value)) => Err(WeightError::Value {
                        name: name(),
                        index,
                        value,
                    }),
                }
            }
        }
    }
}

fn first_not_finite(values: impl Iterator<Item = f32>) -> Option<(usize, f32)> {
    values.enumerate().find(|(_, value)| !value.is_finite())
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
