//! Defines weight formats and multiplies matrices in them.
//!
//! # One reduction order
//!
//! The value of an output element depends on its weights and activations alone: not on how many columns are
//! computed at once, the number of threads, how rows are split into tiles, or the instruction set. Every kernel
//! implements this order:
//!
//! - A row is cut into blocks of [`LANES`] elements; the last block is padded with weights and activations of +0.
//! - Lane l starts at +0 and takes element l of every block, in order, by a fused multiply-add:
//!   `lane[l] = fma(w[j], x[j], lane[l])` with `j % 32 == l`.
//! - The lanes are added in pairs: lane l and l + 16, then l + 8, l + 4, l + 2, l + 1.
//!
//! Thirty-two lanes are four AVX2 registers or two of AVX-512, enough independent chains to hide the latency of
//! the multiply-add. The sums over rows ([`Matrix::add_row`], [`Matrix::matmul_transposed`]) have no lanes: one fused
//! multiply-add an element and row, rows ascending. Results that are NaN are NaN everywhere, with any payload.
//!
//! The formats with scales have the same lanes. `packed` and `docs/formats.md` say which element goes to which lane, and where the scale
//! is multiplied in.
//!
//! # Adding a format
//!
//! Write its kernels (trait `Kernel` in `kernel.rs`) in a new file, then add it to [`Format`] and to `dispatch::kernel_for`.

mod dispatch;
pub mod encode;
mod float;
mod format;
pub mod infer;
mod kernel;
mod matrix;
mod packed;
mod product;
#[cfg(target_arch = "x86_64")]
mod register;
#[cfg(test)]
mod tests;

pub use format::{FP8_BLOCK, Format, MXFP4_GROUP};
pub use kernel::{Isa, LANES};
pub use matrix::{Activations, Matrix, ShapeError};
pub use product::{axpy, dot};

#[cfg(target_endian = "big")]
compile_error!("weights are little-endian and used in place");
