//! Indexes the tensors of all shards by name, in one hash table.
//!
//! A large model has over a hundred thousand tensors, so all names are one string, all shapes one vector,
//! and the hash table holds only the numbers of entries.

use std::path::Path;

use hashbrown::{DefaultHashBuilder, HashTable, hash_table};
use std::hash::BuildHasher;

use super::error::{Flaw, ShardError};
use super::header::{Header, TensorEntry};

/// Name -> tensor.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub names: String,
    pub shapes: Vec<u64>,
    /// By file, then by offset.
    pub tensors: Vec<TensorEntry>,
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Index {
    /// Merges the headers of the files, given in order; `path` gives a file's path. `decide` is given a tensor that is in two files,
    /// and returns the file whose tensor counts, or `None`, which is an error.
    pub(super) fn build<'p>(
        headers: Vec<Header>,
        path: impl Fn(u32) -> &'p Path,
        decide: impl Fn(&str, usize, usize) -> Result<Option<usize>, ShardError>,
    ) -> Result<Index, ShardError> {
        let total = |of: fn(&Header) -> usize| headers.iter().map(of).sum::<usize>();
        // Exact sizes: growing by doubling would take up to twice the memory, and would rehash.
        let mut index = Index {
            names: String::with_capacity(total(|h| h.names.len())),
            shapes: Vec::with_capacity(total(|h| h.shapes.len())),
            tensors: Vec::with_capacity(total(|h| h.tensors.len())),
            table: HashTable::with_capacity(total(|h| h.tensors.len())),
            hasher: DefaultHashBuilder::default(),
        };
        let mut doubles = Vec::new();
        for (file, header) in headers.into_iter().enumerate() {
            index.add(header, path(file as u32), &mut doubles)?;
        }
        index.remove(doubles, path, decide)?;
        Ok(index)
    }

    /// Removes all tensors of a name but the one that counts. `doubles` are the others of a name after its first.
    fn remove<'p>(
        &mut self,
        doubles: Vec<TensorEntry>,
        path: impl Fn(u32) -> &'p Path,
        decide: impl Fn(&str, usize, usize) -> Result<Option<usize>, ShardError>,
    ) -> Result<(), ShardError> {
        if doubles.is_empty() {
            return Ok(());
        }
        // Tensors of three files, of which the index names the one that comes last.
        let mut later = Vec::new();
        for double in doubles {
            let name = double.name(&self.names);
            let hash = self.hasher.hash_one(name);
            let same = |i: &u32| self.tensors[*i as usize].name(&self.names) == name;
            let Some(&at) = self.table.find(hash, same) else {
                continue;
            };
            let first = &self.tensors[at as usize];
            let ambiguous = || doubled(name, first, &double, &path);
            if first.file == double.file {
                return Err(ambiguous());
            }
            let counts = decide(name, first.file as usize, double.file as usize)?;
            match counts {
                Some(file) if file == double.file as usize => self.tensors[at as usize] = double,
                Some(file) if file == first.file as usize => {}
                Some(file) => later.push((file, at, double)),
                None => return Err(ambiguous()),
            }
        }
        for (file, at, double) in later {
            let first = &self.tensors[at as usize];
            if first.file as usize != file {
                let name = double.name(&self.names);
                return Err(doubled(name, first, &double, &path));
            }
        }
        self.tensors.sort_by_key(|t| (t.file, t.offset, t.bytes));
        self.table.clear();
        for (i, tensor) in self.tensors.iter().enumerate() {
            let hash = self.hasher.hash_one(tensor.name(&self.names));
            let rehash = |i: &u32| {
                self.hasher
                    .hash_one(self.tensors[*i as usize].name(&self.names))
            };
            self.table.insert_unique(hash, i as u32, rehash);
        }
        Ok(())
    }

    fn add(
        &mut self,
        header: Header,
        file: &Path,
        doubles: &mut Vec<TensorEntry>,
    ) -> Result<(), ShardError> {
        // Numbers have 32 bits, the end of each arena included.
        let base = |have: usize, more: usize, what| match u32::try_from(have.saturating_add(more)) {
            Ok(_) => Ok(have as u32),
            Err(_) => Err(ShardError::TooMany {
                file: file.to_path_buf(),
                what,
            }),
        };
        let names = base(self.names.len(), header.names.len(), "bytes of names")?;
        let shapes = base(self.shapes.len(), header.shapes.len(), "dimensions")?;
        base(self.tensors.len(), header.tensors.len(), "tensors")?;

        self.names.push_str(&header.names);
        self.shapes.extend_from_slice(&header.shapes);
        for mut entry in header.tensors {
            entry.name += names;
            entry.shape += shapes;
            let name = entry.name(&self.names);
            let place = self.table.entry(
                self.hasher.hash_one(name),
                |&i| self.tensors[i as usize].name(&self.names) == name,
                |&i| {
                    self.hasher
                        .hash_one(self.tensors[i as usize].name(&self.names))
                },
            );
            match place {
                hash_table::Entry::Vacant(slot) => {
                    slot.insert(self.tensors.len() as u32);
                    self.tensors.push(entry);
                }
                hash_table::Entry::Occupied(_) => doubles.push(entry),
            }
        }
        Ok(())
    }

    pub(super) fn find(&self, name: &str) -> Option<&TensorEntry> {
        let tensor = |i: &u32| &self.tensors[*i as usize];
        let hash = self.hasher.hash_one(name);
        let found = self
            .table
            .find(hash, |i| tensor(i).name(&self.names) == name);
        found.map(tensor)
    }
}

fn doubled<'p>(
    name: &str,
    first: &TensorEntry,
    second: &TensorEntry,
    path: impl Fn(u32) -> &'p Path,
) -> ShardError {
    let tensor = name.to_string();
    if first.file == second.file {
        return ShardError::Tensor {
            file: path(first.file).to_path_buf(),
            tensor,
            flaw: Flaw::Twice,
        };
    }
    ShardError::InTwoShards {
        tensor,
        first: path(first.file).to_path_buf(),
        second: path(second.file).to_path_buf(),
    }
}
