//! Plans what each output shard holds and where its bytes come from.
//!
//! The smallest thing that is placed is a *unit*: an expert, or one resident tensor with its scales. Units are in the order
//! of the last source file that they need, so that source files are finished with one after the other. Shards are cut between units,
//! and hold their experts first, so that experts of a size that is a multiple of 4096 bytes all start at one. The
//! matrices of an expert are in the order in which they are read: gate, up, down, each behind its scales.

use std::collections::{BTreeSet, HashSet};

use serde::{Deserialize, Serialize};

use super::{ConvertError, Recipe};
use crate::arch::{Architecture, Projection, Shape, TensorId};
use crate::quant::Format;
use crate::quant::encode::Packing;
use crate::quant::infer::{Sizes, infer};
use crate::shards::{Dtype, Planned, Shards, Tensor};
use crate::stream::Catalog;
use crate::stream::catalog::{Location, Place};
use crate::weight::{Matrices, Role, Rows, Stored, owner_of_scales, role, scales_name};

/// Bytes of a source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Index of the file.
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// A tensor of the output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Full name.
    pub name: String,
    /// Element type, as a header spells it.
    pub dtype: String,
    /// Dimensions.
    pub shape: Vec<u64>,
}

impl Output {
    /// As the writer of shards takes it; `None` for a type that does not exist.
    pub fn planned(&self) -> Option<Planned> {
        Some(Planned {
            name: self.name.clone(),
            dtype: Dtype::parse(&self.dtype)?,
            shape: self.shape.clone(),
        })
    }
}

/// What becomes of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// They stay as they are.
    Copy,
    /// A matrix, or a vector as one row, becomes `to`; f32 if that is `None`.
    Convert {
        /// How it is stored.
        from: Format,
        /// Output size.
        rows: usize,
        /// Input size.
        cols: usize,
        /// What it becomes.
        to: Option<Packing>,
    },
}

/// A matrix or another tensor of the output, with its scales.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// The weights.
    pub weights: Output,
    /// Their scales, which come before them in the file.
    pub scales: Option<Output>,
    /// The format, for the stamp and for statistics.
    pub format: Option<Format>,
    /// Source of the weights.
    pub from: Span,
    /// Source of the scales.
    pub from_scales: Option<Span>,
    /// What is done.
    pub work: Work,
    /// Whether a share of its rows may be zeros: those of tokens that the vocabulary does not use.
    #[serde(default, skip_serializing_if = "is_false")]
    pub padded: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// A shard of the output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// File name.
    pub name: String,
    /// In the order of the file.
    pub items: Vec<Item>,
    /// Whether the source says that its weights are synthetic: zeros in it are meant.
    #[serde(default, skip_serializing_if = "is_false")]
    pub synthetic: bool,
}

/// What was found on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// Matrices that are packed already and are rounded again.
    pub requantised: u64,
    /// Tensors that the architecture does not have.
    pub unknown: u64,
}

/// What is never cut.
struct Unit {
    expert: bool,
    items: Vec<Item>,
}

impl Unit {
    /// Index of the last source file that is needed.
    fn last_file(&self) -> usize {
        let spans = self.items.iter().flat_map(Item::spans);
        spans.map(|span| span.file).max().unwrap_or(0)
    }

    fn bytes(&self) -> u64 {
        self.items.iter().map(Item::bytes).sum()
    }
}

impl Item {
    /// Where its bytes come from.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        std::iter::once(self.from).chain(self.from_scales)
    }

    /// The tensors in the order of the file.
    pub fn outputs(&self) -> impl Iterator<Item = &Output> {
        self.scales.iter().chain(std::iter::once(&self.weights))
    }

    /// Whether the sizes on both sides are those of the matrix or the copy that it is about.
    pub fn fits(&self) -> bool {
        let len = |output: &Output| output.planned().and_then(|p| p.bytes());
        let (to, from) = (len(&self.weights), self.from.bytes);
        let scales = (
            self.scales.as_ref().map(len).unwrap_or(Some(0)),
            self.from_scales.map_or(0, |span| span.bytes),
        );
        let Some((rows, packing)) = self.work.rows() else {
            return to == Some(from) && scales.0 == Some(scales.1);
        };
        let Rows { format, cols, .. } = rows;
        // A row takes a byte at least: without columns there is no bound to the number of rows.
        if rows.rows as u64 > from.max(1) {
            return false;
        }
        let sizes = |format: Format| {
            let row = format.row_bytes(cols).map(|n| n as u64);
            let bytes = row.and_then(|row| row.checked_mul(rows.rows as u64));
            (bytes, format.scale_bytes(rows.rows, cols).map(|n| n as u64))
        };
        let target = packing.map_or(Format::F32, |packing| packing.format(cols));
        sizes(format) == (Some(from), Some(scales.1)) && sizes(target) == (to, scales.0)
    }

    /// How the matrix is stored in the source; `None` for vectors and unknown tensors, which may be zeros.
    pub fn source_format(&self) -> Option<Format> {
        let format = match self.work {
            Work::Convert { from, .. } => Some(from),
            Work::Copy => self.format,
        };
        format.filter(|_| self.scales.is_some() || self.weights.shape.len() > 1)
    }

    /// Bytes in the output.
    pub fn bytes(&self) -> u64 {
        let planned = self.outputs().filter_map(Output::planned);
        planned.filter_map(|p| p.bytes()).sum()
    }
}

/// Plans the shards.
///
/// # Errors
/// A checkpoint that is incomplete or does not fit its config, and formats that could not be read back.
pub fn plan(
    shards: &Shards,
    arch: &Architecture,
    recipe: &Recipe,
    shard_size: u64,
) -> Result<(Vec<Shard>, Notes), ConvertError> {
    if arch.experts.in_pairs() {
        let model_type = arch.model_type;
        return Err(ConvertError::InPairs { model_type });
    }
    let mut planner = Planner {
        shards,
        arch,
        recipe,
        matrices: Matrices::new(shards)?,
        taken: HashSet::new(),
        notes: Notes::default(),
    };
    let mut units = planner.experts()?;
    for tensor in shards.iter() {
        if planner.taken.contains(tensor.name) {
            continue;
        }
        if let Some(item) = planner.tensor(tensor)? {
            units.push(Unit {
                expert: false,
                items: vec![item],
            });
        }
    }
    // Stable: experts of a file by layer and number, then the others in the order of the file.
    units.sort_by_key(Unit::last_file);
    Ok((cut(units, shard_size), planner.notes))
}

/// Cuts the units into shards.
fn cut(units: Vec<Unit>, shard_size: u64) -> Vec<Shard> {
    let mut groups: Vec<Vec<Unit>> = Vec::new();
    let mut room = 0;
    for unit in units {
        let bytes = unit.bytes();
        match groups.last_mut() {
            Some(group) if bytes <= room => group.push(unit),
            _ => {
                room = shard_size;
                groups.push(vec![unit]);
            }
        }
        room = room.saturating_sub(bytes);
    }
    let count = groups.len();
    let shard = |(i, mut units): (usize, Vec<Unit>)| {
        units.sort_by_key(|unit| !unit.expert);
        let name = match count {
            1 => "model.safetensors".into(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let items = units.into_iter().flat_map(|unit| unit.items).collect();
        Shard {
            name,
            items,
            synthetic: false,
        }
    };
    groups.into_iter().enumerate().map(shard).collect()
}

struct Planner<'a> {
    shards: &'a Shards,
    arch: &'a Architecture,
    recipe: &'a Recipe,
    matrices: Matrices<'a>,
    /// Names of source tensors that belong to something that is planned.
    taken: HashSet<String>,
    notes: Notes,
}

impl Planner<'_> {
    /// The experts of every sparse layer and of every layer for drafts.
    fn experts(&mut self) -> Result<Vec<Unit>, ConvertError> {
        let mut layers: BTreeSet<usize> = self.arch.sparse_layers().collect();
        for tensor in self.shards.iter() {
            let id = self.arch.names.parse(tensor.name);
            let draft = id.filter(|id| id.is_expert()).and_then(TensorId::layer);
            layers.extend(draft.filter(|layer| self.arch.is_draft(*layer)));
        }
        let catalog = Catalog::of_layers(self.shards, self.arch, layers)?;
        let mut units = Vec::new();
        for layer in catalog.layers() {
            let packing = match self.arch.is_draft(layer) {
                true => self.recipe.mtp,
                false => self.recipe.experts,
            };
            for expert in 0..catalog.experts() as u32 {
                let Some(matrices) = catalog.expert(layer, expert) else {
                    continue;
                };
                let mut items = Vec::new();
                for (projection, location) in Projection::ALL.into_iter().zip(matrices) {
                    self.taken
                        .insert(catalog.tensor_name(layer, expert, projection));
                    self.taken
                        .insert(catalog.scales_name(layer, expert, projection));
                    let name = self.arch.name(TensorId::Expert(layer, expert, projection));
                    items.push(self.matrix(name, location, packing)?);
                }
                units.push(Unit {
                    expert: true,
                    items,
                });
            }
        }
        Ok(units)
    }

    /// The resident matrix of this name, with rows and columns.
    fn resident_matrix(&self, name: &str) -> Option<(TensorId, [usize; 2])> {
        match self.arch.find(name)? {
            (id, Shape::Matrix(rows, cols)) if !id.is_expert() => Some((id, [rows, cols])),
            _ => None,
        }
    }

    /// A tensor that is no routed expert; `None` when it is the scales of another one.
    fn tensor(&mut self, tensor: Tensor<'_>) -> Result<Option<Item>, ConvertError> {
        if let Some(owner) = owner_of_scales(tensor.name)
            && self.resident_matrix(owner).is_some()
            && let Some(owner) = self.shards.find(owner)
            && matches!(owner.dtype, Dtype::U8 | Dtype::F8E4M3)
        {
            return Ok(None);
        }
        if let Some((id, [rows, cols])) = self.resident_matrix(tensor.name) {
            let stored = self.matrices.find(tensor.name, &[rows, cols])?;
            let location = locate(&stored, rows, cols);
            let name = tensor.name.to_owned();
            let packing = match role(id) {
                Role::Router => return Ok(Some(floats(name, &[rows, cols], &location))),
                _ if id.layer().is_some_and(|layer| self.arch.is_draft(layer)) => self.recipe.mtp,
                Role::Embedding => self.recipe.embed,
                _ => self.recipe.dense,
            };
            let item = self.matrix(name, location, packing)?;
            return Ok(Some(Item {
                padded: role(id) == Role::Embedding,
                ..item
            }));
        }
        let found = self.arch.find(tensor.name);
        let vector = matches!(found, Some((_, Shape::Vector(_)))) && tensor.shape.len() == 1;
        let format = match tensor.dtype {
            Dtype::Bf16 => Some(Format::Bf16),
            Dtype::F16 => Some(Format::F16),
            Dtype::F32 => Some(Format::F32),
            _ => None,
        };
        if let Some(format) = format
            && vector
        {
            let cols = usize::try_from(tensor.bytes).unwrap_or(usize::MAX)
                / format.row_bytes(1).unwrap_or(1);
            let location = Location {
                file: tensor.file,
                offset: tensor.offset,
                bytes: tensor.bytes,
                scales: Place {
                    file: tensor.file,
                    offset: 0,
                    bytes: 0,
                },
                format,
                rows: 1,
                cols,
            };
            return Ok(Some(floats(tensor.name.to_owned(), &[cols], &location)));
        }
        self.notes.unknown += 1;
        Ok(Some(Item {
            weights: Output {
                name: tensor.name.to_owned(),
                dtype: tensor.dtype.name().to_owned(),
                shape: tensor.shape.to_vec(),
            },
            scales: None,
            format: None,
            from: Span {
                file: tensor.file,
                offset: tensor.offset,
                bytes: tensor.bytes,
            },
            from_scales: None,
            work: Work::Copy,
            padded: false,
        }))
    }

    /// The matrix at `location`, as `packing` or as it is.
    fn matrix(
        &mut self,
        name: String,
        location: Location,
        packing: Option<Packing>,
    ) -> Result<Item, ConvertError> {
        let Location {
            format, rows, cols, ..
        } = location;
        let to = packing.map_or(format, |packing| packing.format(cols));
        if let Some(packing) = packing {
            readable(&name, rows, cols, packing)?;
        }
        let (from, from_scales) = spans(&location);
        let work = if to == format {
            Work::Copy
        } else {
            self.notes.requantised += u64::from(is_packed(format));
            Work::Convert {
                from: format,
                rows,
                cols,
                to: packing,
            }
        };
        let bytes = |n: Option<usize>| n.unwrap_or(usize::MAX) as u64;
        let scale_bytes = bytes(to.scale_bytes(rows, cols));
        let scales = scales_name(to, &name).map(|name| Output {
            name,
            dtype: match to.scale_width() {
                2 => Dtype::Bf16.name().to_owned(),
                _ => Dtype::F32.name().to_owned(),
            },
            shape: match to {
                _ if to.is_fp8() => vec![rows.div_ceil(128) as u64, cols.div_ceil(128) as u64],
                _ => vec![scale_bytes / 4],
            },
        });
        let shape = match is_packed(to) {
            true => vec![bytes(
                to.row_bytes(cols).and_then(|row| row.checked_mul(rows)),
            )],
            false => vec![rows as u64, cols as u64],
        };
        Ok(Item {
            weights: Output {
                name,
                dtype: dtype(to).name().to_owned(),
                shape,
            },
            scales,
            format: Some(to),
            from,
            from_scales,
            work,
            padded: false,
        })
    }
}

/// Whether codes are in one-dimensional tensors of bytes.
pub fn is_packed(format: Format) -> bool {
    dtype(format) == Dtype::U8
}

fn dtype(format: Format) -> Dtype {
    match format {
        Format::F32 => Dtype::F32,
        Format::F16 => Dtype::F16,
        Format::Bf16 => Dtype::Bf16,
        Format::Fp8Block | Format::Fp8BlockBf16 => Dtype::F8E4M3,
        Format::Int8Row | Format::Int4Row | Format::Int4Group(_) | Format::Int2Row => Dtype::U8,
        Format::Mxfp4 => Dtype::U8,
    }
}

/// Checks that a reader finds the format from the sizes and the stamp.
fn readable(name: &str, rows: usize, cols: usize, packing: Packing) -> Result<(), ConvertError> {
    let format = packing.format(cols);
    let bytes = |n: Option<usize>| n.unwrap_or(usize::MAX) as u64;
    let sizes = Sizes {
        rows,
        cols,
        weights: bytes(format.row_bytes(cols).and_then(|row| row.checked_mul(rows))),
        scales: bytes(format.scale_bytes(rows, cols)) / 4,
    };
    match infer(sizes, Some(format.name())) {
        Ok(found) if found == format => Ok(()),
        Ok(found) => Err(ConvertError::Misread {
            name: name.to_owned(),
            cols,
            packing,
            found,
        }),
        Err(source) => Err(ConvertError::Unreadable {
            name: name.to_owned(),
            cols,
            packing,
            source,
        }),
    }
}

fn locate(stored: &Stored<'_>, rows: usize, cols: usize) -> Location {
    let tensor = &stored.tensor;
    let scales = stored.scales.map(|scales| Place {
        file: scales.file,
        offset: scales.offset,
        bytes: scales.bytes,
    });
    Location {
        file: tensor.file,
        offset: tensor.offset,
        bytes: tensor.bytes,
        scales: scales.unwrap_or(Place {
            file: tensor.file,
            offset: 0,
            bytes: 0,
        }),
        format: stored.format,
        rows,
        cols,
    }
}

fn spans(location: &Location) -> (Span, Option<Span>) {
    let span = |file, offset, bytes| Span {
        file,
        offset,
        bytes,
    };
    let scales = location.scales;
    (
        span(location.file, location.offset, location.bytes),
        (location.format.row_scales(location.cols) > 0)
            .then(|| span(scales.file, scales.offset, scales.bytes)),
    )
}

/// A matrix or vector of any format as F32 of the given shape.
fn floats(name: String, shape: &[usize], location: &Location) -> Item {
    let (from, from_scales) = spans(location);
    Item {
        weights: Output {
            name,
            dtype: Dtype::F32.name().to_owned(),
            shape: shape.iter().map(|n| *n as u64).collect(),
        },
        scales: None,
        format: Some(Format::F32),
        from,
        from_scales,
        work: match location.format {
            Format::F32 => Work::Copy,
            from => Work::Convert {
                from,
                rows: location.rows,
                cols: location.cols,
                to: None,
            },
        },
        padded: false,
    }
}

impl Work {
    /// The matrix that is read by rows; `None` where bytes are copied.
    pub fn rows(&self) -> Option<(Rows, Option<Packing>)> {
        match *self {
            Work::Copy => None,
            Work::Convert {
                from,
                rows,
                cols,
                to,
            } => Some((
                Rows {
                    format: from,
                    rows,
                    cols,
                },
                to,
            )),
        }
    }
}
