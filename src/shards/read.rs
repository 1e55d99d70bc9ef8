//! Reads ranges of tensors as raw bytes or floats, and gives hints to the page cache.

use std::path::PathBuf;

use bytemuck::allocation::try_zeroed_slice_box;
use colibri_ring::{Advice, File};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use super::{Cache, Dtype, ShardError, Shards, Tensor};

/// Bytes read at a time for conversion to f32: the second-level cache holds them, and the system call costs little by comparison.
const PIECE: usize = 1 << 20;

/// Bytes of a raw read after which the page cache drops them, so that it never holds more.
const RAW_PIECE: usize = 64 << 20;

/// Size of a page of the page cache, in bytes. Where pages are larger, the hints are less exact.
const PAGE: u64 = 4096;

impl Shards {
    /// The whole tensor as f32, row-major (BF16, F16, F32 only). NaNs stay NaNs, but signalling ones become
    /// quiet.
    ///
    /// # Errors
    /// No such tensor, another dtype, no memory, or a failing read.
    pub fn read_f32(&self, name: &str, cache: Cache) -> Result<Vec<f32>, ShardError> {
        let tensor = self.get(name)?;
        self.floats(&tensor, 0, tensor.elements(), cache)
    }

    /// `count` elements from element `start` on, as f32 (BF16, F16, F32 only).
    ///
    /// # Errors
    /// Those of [`Shards::read_f32`], and a slice that is not inside the tensor.
    pub fn read_slice_f32(
        &self,
        name: &str,
        start: u64,
        count: u64,
        cache: Cache,
    ) -> Result<Vec<f32>, ShardError> {
        let tensor = self.get(name)?;
        let elements = tensor.elements();
        self.float_width(&tensor)?;
        // By subtraction: start + count may overflow.
        if start > elements || count > elements - start {
            return Err(ShardError::Slice {
                file: self.path(&tensor),
                tensor: name.to_string(),
                start,
                count,
                elements,
            });
        }
        self.floats(&tensor, start, count, cache)
    }

    /// The whole tensor's bytes, any dtype.
    ///
    /// # Errors
    /// No such tensor, no memory, or a failing read.
    pub fn read_raw(&self, name: &str, cache: Cache) -> Result<Vec<u8>, ShardError> {
        let tensor = self.get(name)?;
        let mut out = zeroed::<u8>(&tensor, tensor.bytes)?;
        for (i, piece) in out.chunks_mut(RAW_PIECE).enumerate() {
            self.read_piece(&tensor, (i * RAW_PIECE) as u64, piece, cache)?;
        }
        Ok(out)
    }

    /// Starts reading a tensor into the page cache. Only a hint: it may be ignored.
    ///
    /// # Errors
    /// No such tensor.
    pub fn prefetch(&self, name: &str) -> Result<(), ShardError> {
        let tensor = self.get(name)?;
        let file = &self.files()[tensor.file];
        for (offset, len) in pieces(tensor.offset, tensor.bytes, self.read_ahead(tensor.file)) {
            file.advise(offset, len, Advice::WillNeed);
        }
        Ok(())
    }

    fn path(&self, tensor: &Tensor<'_>) -> PathBuf {
        self.files()[tensor.file].path().to_path_buf()
    }

    /// Bytes per element of a tensor that can be read as floats.
    fn float_width(&self, tensor: &Tensor<'_>) -> Result<usize, ShardError> {
        match tensor.dtype {
            Dtype::Bf16 | Dtype::F16 | Dtype::F32 => Ok(tensor.dtype.bits() as usize / 8),
            dtype => Err(ShardError::NotFloat {
                file: self.path(tensor),
                tensor: tensor.name.to_string(),
                dtype,
            }),
        }
    }

    /// Elements `[start, start + count)`, which are inside the tensor.
    fn floats(
        &self,
        tensor: &Tensor<'_>,
        start: u64,
        count: u64,
        cache: Cache,
    ) -> Result<Vec<f32>, ShardError> {
        let width = self.float_width(tensor)?;
        let mut out = zeroed::<f32>(tensor, count)?;
        // u16, so that the halves in it are aligned.
        let mut halves = vec![0u16; (PIECE / 2).min(out.len())];
        let mut at = start * width as u64;
        for out in out.chunks_mut(PIECE / width) {
            if tensor.dtype == Dtype::F32 {
                self.read_piece(tensor, at, bytemuck::cast_slice_mut(out), cache)?;
                for x in out.iter_mut() {
                    *x = f32::from_bits(u32::from_le(x.to_bits()));
                }
            } else {
                let halves = &mut halves[..out.len()];
                self.read_piece(tensor, at, bytemuck::cast_slice_mut(halves), cache)?;
                for x in halves.iter_mut() {
                    *x = u16::from_le(*x);
                }
                if tensor.dtype == Dtype::Bf16 {
                    halves.reinterpret_cast::<bf16>().convert_to_f32_slice(out);
                } else {
                    halves.reinterpret_cast::<f16>().convert_to_f32_slice(out);
                }
            }
            at += (out.len() * width) as u64;
        }
        Ok(out)
    }

    /// Bytes of a tensor from its byte `at` on, any dtype.
    ///
    /// # Errors
    /// A failing read. A range that is not inside the tensor may be one.
    pub fn read_part(
        &self,
        tensor: &Tensor<'_>,
        at: u64,
        buf: &mut [u8],
        cache: Cache,
    ) -> Result<(), ShardError> {
        self.read_piece(tensor, at, buf, cache)
    }

    /// Reads bytes of a tensor from its byte `at` on, and drops them from the page cache if asked to.
    fn read_piece(
        &self,
        tensor: &Tensor<'_>,
        at: u64,
        buf: &mut [u8],
        cache: Cache,
    ) -> Result<(), ShardError> {
        let file = self.read_from_a_copy(tensor, buf, at)?;
        let offset = tensor.offset + at;
        if cache == Cache::Drop {
            drop_pages(file, offset, buf.len() as u64);
        }
        Ok(())
    }
}

impl Shards {
    /// Reads bytes of a tensor from its byte `at` on: of the primary, and where that fails, of the mirrors. Returns the
    /// file that served.
    fn read_from_a_copy(
        &self,
        tensor: &Tensor<'_>,
        buf: &mut [u8],
        at: u64,
    ) -> Result<&File, ShardError> {
        let offset = tensor.offset + at;
        let primary = &self.files()[tensor.file];
        let Err(source) = primary.read_at(buf, offset) else {
            return Ok(primary);
        };
        for copy in self.copies(tensor.file) {
            if copy.file.read_at(buf, offset).is_ok() {
                tracing::warn!("{source}; {} serves", copy.file.path().display());
                return Ok(&copy.file);
            }
        }
        Err(ShardError::Read {
            tensor: tensor.name.to_string(),
            source,
        })
    }
}

/// Drops a range from the page cache, in whole pages: the kernel keeps pages that are partly outside the range, so pieces of a
/// tensor would leave a page between any two. The first and the last page may also belong to a neighbour, which is then read again.
fn drop_pages(file: &File, offset: u64, len: u64) {
    let start = offset - offset % PAGE;
    let end = (offset + len).next_multiple_of(PAGE);
    file.advise(start, end - start, Advice::DontNeed);
}

/// Cuts a range into pieces of at most `longest` bytes, as (offset, length).
fn pieces(offset: u64, len: u64, longest: u64) -> impl Iterator<Item = (u64, u64)> {
    let longest = longest.max(PAGE);
    (0..len.div_ceil(longest)).map(move |i| {
        let at = i * longest;
        (offset + at, longest.min(len - at))
    })
}

/// `len` zeros from the allocator, which for large sizes are fresh pages. Writing zeros would double the memory traffic of a load.
fn zeroed<T: bytemuck::Zeroable>(tensor: &Tensor<'_>, len: u64) -> Result<Vec<T>, ShardError> {
    let allocated = usize::try_from(len)
        .map_err(drop)
        .and_then(try_zeroed_slice_box::<T>);
    allocated.map(Vec::from).map_err(|()| ShardError::Memory {
        tensor: tensor.name.to_string(),
        bytes: len.saturating_mul(size_of::<T>() as u64),
    })
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn pieces_cover_a_range_once() {
        for (offset, len) in [(0, 0), (5, 1), (5, 4096), (5, 4097), (5 << 30, 3 << 30)] {
            let mut at = offset;
            for (start, n) in pieces(offset, len, 128 << 10) {
                assert_eq!(start, at);
                assert!(n > 0 && n <= 128 << 10);
                at += n;
            }
            assert_eq!(at, offset + len);
        }
    }
}
