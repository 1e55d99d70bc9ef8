//! Parses one shard's header: from JSON text to validated tensors.
//!
//! The safetensors crate's `Metadata` parses the same text, but loses which name came twice and which tensor is at fault, and
//! keeps a string and a vector per tensor. This parser fills two arenas instead. The tests compare it with the crate.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;

use colibri_ring::headers::PREFIX;
use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::Dtype;
use super::error::{Flaw, ShardError, Shown};

/// The longest header that the format allows, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;

/// `__metadata__` of one shard.
pub type Metadata = BTreeMap<String, String>;

/// One tensor. Its name and its shape are ranges of the arenas that its owner keeps.
#[derive(Clone, Debug)]
pub(super) struct TensorEntry {
    /// Where the name starts in `names`, and its length.
    pub name: u32,
    pub name_len: u32,
    /// Where the shape starts in `shapes`, and its length.
    pub shape: u32,
    pub rank: u32,
    /// Index of the file.
    pub file: u32,
    pub dtype: Dtype,
    /// Absolute byte offset in the file.
    pub offset: u64,
    pub bytes: u64,
}

impl TensorEntry {
    pub(super) fn name<'a>(&self, names: &'a str) -> &'a str {
        let start = self.name as usize;
        &names[start..start + self.name_len as usize]
    }

    pub(super) fn shape<'a>(&self, shapes: &'a [u64]) -> &'a [u64] {
        let start = self.shape as usize;
        &shapes[start..start + self.rank as usize]
    }
}

/// The tensors of one shard, in the order of their data.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub names: String,
    pub shapes: Vec<u64>,
    pub tensors: Vec<TensorEntry>,
    pub metadata: Metadata,
}

impl Header {
    /// Parses and validates the header of file number `file`, which has `size` bytes in all.
    ///
    /// Afterwards offsets lie inside the file, every byte after the header belongs to exactly one tensor, and each tensor's bytes are
    /// what its shape and dtype take. The index refuses names that are given twice.
    pub(super) fn parse(
        text: &[u8],
        path: &Path,
        file: u32,
        size: u64,
    ) -> Result<Header, ShardError> {
        let text = std::str::from_utf8(text).map_err(|e| ShardError::Utf8 {
            file: path.to_path_buf(),
            valid: e.valid_up_to(),
        })?;
        let mut parser = Parser {
            header: Header::default(),
            file,
            current: None,
            flaw: None,
        };
        let mut json = serde_json::Deserializer::from_str(text);
        let read = parser.deserialize(&mut json).and_then(|()| json.end());
        let Parser {
            mut header,
            current,
            flaw,
            ..
        } = parser;
        if let Err(e) = read {
            let tensor = current.map(|name| header.names[name].to_string());
            let file = path.to_path_buf();
            return Err(match (flaw, tensor) {
                (Some(flaw), Some(tensor)) => ShardError::Tensor { file, tensor, flaw },
                (_, tensor) => ShardError::Json {
                    file,
                    tensor,
                    reason: Shown(&e.to_string()).to_string(),
                },
            });
        }
        let data_start = PREFIX + text.len() as u64;
        header.place(path, data_start, size.saturating_sub(data_start))?;
        Ok(header)
    }

    /// Checks that the tensors cover the data section of `data` bytes exactly, and turns their offsets
    /// into offsets of the file.
    fn place(&mut self, path: &Path, data_start: u64, data: u64) -> Result<(), ShardError> {
        // Nearly always sorted already. Of two tensors that start together the empty one comes first.
        self.tensors.sort_by_key(|t| (t.offset, t.bytes));
        let mut end = 0;
        for (i, tensor) in self.tensors.iter().enumerate() {
            let start = tensor.offset;
            // Cannot overflow: the entry's own end was given as this number.
            let tensor_end = start + tensor.bytes;
            let flaw = if tensor_end > data {
                Some(Flaw::BeyondFile {
                    start,
                    end: tensor_end,
                    data,
                })
            } else if start > end {
                Some(Flaw::Hole { from: end, start })
            } else if start < end {
                let other = self.tensors[i - 1].name(&self.names);
                Some(Flaw::Overlap(other.to_string()))
            } else {
                None
            };
            if let Some(flaw) = flaw {
                return Err(self.flawed(path, tensor, flaw));
            }
            end = tensor_end;
        }
        if end < data {
            return Err(match self.tensors.last() {
                Some(last) => self.flawed(path, last, Flaw::FileGoesOn { end, data }),
                None => ShardError::NoTensors {
                    file: path.to_path_buf(),
                    bytes: data,
                },
            });
        }
        for tensor in &mut self.tensors {
            tensor.offset += data_start;
        }
        Ok(())
    }

    /// The error for a tensor in the wrong place: that a name is given twice, where one is, since that is the cause.
    fn flawed(&self, path: &Path, tensor: &TensorEntry, flaw: Flaw) -> ShardError {
        let mut seen = HashSet::new();
        let twice = self
            .tensors
            .iter()
            .map(|t| t.name(&self.names))
            .find(|name| !seen.insert(*name));
        ShardError::Tensor {
            file: path.to_path_buf(),
            tensor: twice.unwrap_or(tensor.name(&self.names)).to_string(),
            flaw: twice.map_or(flaw, |_| Flaw::Twice),
        }
    }
}

/// Parses the outer object.
struct Parser {
    header: Header,
    file: u32,
    /// Name of the tensor whose entry is being read, as a range of `names`.
    current: Option<Range<usize>>,
    /// Why parsing stopped, unless the syntax is at fault.
    flaw: Option<Flaw>,
}

impl Parser {
    /// Adds the tensor `name` if its entry is valid in itself.
    fn add(&mut self, name: Range<usize>, entry: RawEntry) -> Result<(), Flaw> {
        let dtype = match entry.dtype.ok_or(Flaw::NoField("dtype"))? {
            Named::Known(dtype) => dtype,
            Named::Unknown(name) => return Err(Flaw::UnknownDtype(name)),
        };
        let shape = entry.shape.ok_or(Flaw::NoField("shape"))?;
        let [start, end] = entry.offsets.ok_or(Flaw::NoField("data_offsets"))?;
        let dims = &self.header.shapes[shape.clone()];

        let have = end
            .checked_sub(start)
            .ok_or(Flaw::Reversed { start, end })?;
        let elements = dims.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let bits = elements.and_then(|n| n.checked_mul(dtype.bits()));
        let Some((elements, _)) = elements.zip(bits) else {
            let shape = dims.to_vec();
            return Err(Flaw::ShapeOverflow { shape, dtype });
        };
        let Some(want) = dtype.bytes(elements) else {
            let shape = dims.to_vec();
            return Err(Flaw::PartialByte { shape, dtype });
        };
        if want != have {
            return Err(Flaw::Size {
                shape: dims.to_vec(),
                dtype,
                want,
                have,
            });
        }
        // A header is at most 100 MB, so what it holds can be numbered with 32 bits.
        self.header.tensors.push(TensorEntry {
            name: name.start as u32,
            name_len: name.len() as u32,
            shape: shape.start as u32,
            rank: shape.len() as u32,
            file: self.file,
            dtype,
            offset: start,
            bytes: have,
        });
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Parser {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Parser {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata = false;
        while let Some(key) = map.next_key_seed(Key(&mut self.header.names))? {
            let Some(name) = key else {
                if std::mem::replace(&mut metadata, true) {
                    return Err(A::Error::custom("__metadata__ is given twice"));
                }
                self.header.metadata = map.next_value::<Option<Metadata>>()?.unwrap_or_default();
                continue;
            };
            self.current = Some(name.clone());
            let entry = map.next_value_seed(EntrySeed(&mut self.header.shapes))?;
            if let Err(flaw) = self.add(name, entry) {
                let error = A::Error::custom(&flaw);
                self.flaw = Some(flaw);
                return Err(error);
            }
            self.current = None;
        }
        Ok(())
    }
}

/// Parses a key: appends a tensor's name to the arena and returns its range, or `None` for `__metadata__`.
struct Key<'a>(&'a mut String);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<Range<usize>>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = Option<Range<usize>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a tensor")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        if name == "__metadata__" {
            return Ok(None);
        }
        let start = self.0.len();
        self.0.push_str(name);
        Ok(Some(start..self.0.len()))
    }
}

/// A tensor's entry as written.
#[derive(Default)]
struct RawEntry {
    dtype: Option<Named>,
    /// A range of the arena of shapes.
    shape: Option<Range<usize>>,
    offsets: Option<[u64; 2]>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    /// Fields that a later version of the format may add.
    #[serde(other)]
    Other,
}

/// Parses a tensor's entry, its shape into the arena.
struct EntrySeed<'a>(&'a mut Vec<u64>);

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = RawEntry;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<RawEntry, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = RawEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEntry, A::Error> {
        let mut entry = RawEntry::default();
        while let Some(field) = map.next_key()? {
            let twice = match field {
                Field::Dtype => entry.dtype.replace(map.next_value()?).is_some(),
                Field::Shape => {
                    let shape = map.next_value_seed(ShapeSeed(self.0))?;
                    entry.shape.replace(shape).is_some()
                }
                Field::DataOffsets => entry.offsets.replace(map.next_value()?).is_some(),
                Field::Other => {
                    map.next_value::<IgnoredAny>()?;
                    false
                }
            };
            if twice {
                return Err(A::Error::custom("a field is given twice"));
            }
        }
        Ok(entry)
    }
}

/// Appends the dimensions to the arena and returns their range.
struct ShapeSeed<'a>(&'a mut Vec<u64>);

impl<'de> DeserializeSeed<'de> for ShapeSeed<'_> {
    type Value = Range<usize>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed<'_> {
    type Value = Range<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut dims: A) -> Result<Self::Value, A::Error> {
        let start = self.0.len();
        while let Some(dim) = dims.next_element()? {
            self.0.push(dim);
        }
        Ok(start..self.0.len())
    }
}

/// The value of a dtype field.
enum Named {
    Known(Dtype),
    Unknown(String),
}

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Named, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Named;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a dtype")
            }
            fn visit_str<E>(self, name: &str) -> Result<Named, E> {
                Ok(match Dtype::parse(name) {
                    Some(dtype) => Named::Known(dtype),
                    None => Named::Unknown(name.to_string()),
                })
            }
        }
        json.deserialize_str(Name)
    }
}
