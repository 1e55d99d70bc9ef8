//! Compares samples of the content of copies with their primaries: models of one architecture have the same sizes and headers.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use colibri_ring::{File, FileError};

use super::header::TensorEntry;
use super::holes::{holes, reads_as_zeros};
use super::mirror::{Refusal, refuse};
use super::{Dtype, Shards};

/// Bytes that are compared at each place.
const PIECE: u64 = 4096;

/// Places that are spread evenly over the data of a shard.
const EVEN: u64 = 16;

/// Tensors whose first bytes are compared too, no two of one type and shape: so those of each kind of resident tensor.
const KINDS: usize = 24;

/// Shards that are compared at once: small reads of drives take long, and drives answer many at a time.
const THREADS: usize = 16;

impl Shards {
    /// Refuses copies in mirrors whose content differs from the primary's in a sample, or that have holes where the primary has
    /// data. Reads some 100 KiB of each shard.
    pub fn refuse_other_weights(&mut self) {
        let jobs: Vec<(usize, usize)> = (0..self.files.len())
            .flat_map(|file| (0..self.copies[file].len()).map(move |copy| (file, copy)))
            .collect();
        if jobs.is_empty() {
            return;
        }
        let (next, refused) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            while let Some(&(file, copy)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Some(reason) = self.unlike(file, copy) {
                    let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
                    refused.push((file, copy, reason));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS.min(jobs.len()) {
                // The others take the work of a thread that the system refuses.
                let spawned = std::thread::Builder::new().spawn_scoped(scope, work);
                if spawned.is_err() {
                    break;
                }
            }
            work();
        });
        let mut refused = refused.into_inner().unwrap_or_else(PoisonError::into_inner);
        // From the end, so that the places of the others stay.
        refused.sort_by_key(|(file, copy, _)| (*file, *copy));
        for (file, copy, reason) in refused.into_iter().rev() {
            let mirror = self.copies[file].remove(copy).mirror;
            let dir = &self.mirrors[mirror];
            refuse(&mut self.faults[mirror], dir, &self.files, file, reason);
        }
    }

    /// Why a copy of a file cannot have the same weights.
    fn unlike(&self, file: usize, copy: usize) -> Option<Refusal> {
        let (primary, copy) = (&self.files[file], &self.copies[file][copy].file);
        let of_file = self.of_file(file);
        let start = of_file.iter().map(|entry| entry.offset).min()?;
        // A tool that copies zeros as holes is no reason.
        let hole = |hole| !reads_as_zeros(primary, hole);
        if holes(copy, start).iter().any(hole) {
            return Some(Refusal::Hole);
        }
        let kinds = self.kinds(of_file);
        match same_data(primary, copy, start, &kinds) {
            Ok(true) => None,
            Ok(false) => Some(Refusal::Content),
            Err(error) => Some(Refusal::File(error)),
        }
    }

    /// Where the first tensor of each type and shape begins.
    fn kinds(&self, tensors: &[TensorEntry]) -> Vec<u64> {
        let mut seen: HashSet<(Dtype, &[u64])> = HashSet::new();
        let kinds = tensors.iter().filter(|entry| {
            entry.bytes > 0 && seen.insert((entry.dtype, entry.shape(&self.index.shapes)))
        });
        kinds.take(KINDS).map(|entry| entry.offset).collect()
    }
}

/// Whether two files of one size have the same bytes from `start` on: at places that are spread evenly, and at `places`.
fn same_data(a: &File, b: &File, start: u64, places: &[u64]) -> Result<bool, FileError> {
    let size = a.size();
    // Divided first: sizes near the largest must not overflow. The last piece ends where the file does.
    let room = (size - start).saturating_sub(PIECE);
    let even =
        (0..EVEN).map(|i| start + room / (EVEN - 1) * i + room % (EVEN - 1) * i / (EVEN - 1));
    let (mut x, mut y) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
    for at in even.chain(places.iter().copied()) {
        let len = PIECE.min(size - at) as usize;
        a.read_at(&mut x[..len], at)?;
        b.read_at(&mut y[..len], at)?;
        if x[..len] != y[..len] {
            return Ok(false);
        }
    }
    Ok(true)
}
