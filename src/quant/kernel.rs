//! Defines what a weight format provides, and finds the instruction sets of the CPU.

use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

use super::matrix::Matrix;

/// Number of partial sums of a dot product.
pub const LANES: usize = 32;

/// The products of one format on one instruction set. Each call stays on its thread.
pub trait Kernel: Sync {
    /// The vectors `x` [n, cols] in the order in which [`Kernel::matmul`] takes them. A product calls it once, not once a tile.
    fn arrange<'x>(&self, x: &'x [f32], _cols: usize) -> Cow<'x, [f32]> {
        Cow::Borrowed(x)
    }

    /// y[c][r] = W[r, :] . x[c] for all rows of `w` and all columns, in the reduction order of [`super`]. `x` is
    /// [y.len(), cols] row-major, as [`Kernel::arrange`] left it; every element of `y` has `w.rows` values.
    fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [&mut [f32]]);

    /// y[j] += a[r] * W[r, j], one fused multiply-add each, for all rows r of `w`, ascending. `a` has `w.rows` values, `y` has `w.cols`.
    fn add_rows(&self, w: Matrix<'_>, a: &[f32], y: &mut [f32]);
}

/// The sum of `lanes`, a power of two of them, added in pairs: those half the width apart first, then a quarter, and so on.
pub(super) fn sum_lanes<const L: usize>(mut lanes: [f32; L]) -> f32 {
    let mut width = L / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The instruction set of all products, once one has been chosen.
static CHOSEN: OnceLock<Isa> = OnceLock::new();

/// An instruction set that this CPU has: only [`Isa::available`] makes one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Level);

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Any CPU.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F on top of [`Level::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The instruction sets of this CPU, the best last.
    pub fn available() -> Vec<Isa> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
        let mut all = vec![Isa(Level::Portable)];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            all.push(Isa(Level::Avx2));
            if is_x86_feature_detected!("avx512f") {
                all.push(Isa(Level::Avx512));
            }
        }
        all
    }

    pub(super) fn level(self) -> Level {
        self.0
    }

    /// The instruction set that products use: the best, unless another one was imposed.
    pub(super) fn chosen() -> Isa {
        *CHOSEN.get_or_init(|| *Isa::available().last().unwrap_or(&Isa(Level::Portable)))
    }

    /// Makes products use this one instead of the best, for measuring. Call it before the first product: afterwards it returns false
    /// unless this one is in use already.
    pub fn impose(self) -> bool {
        *CHOSEN.get_or_init(|| self) == self
    }
}

/// The name: `Portable`, `Avx2` or `Avx512`.
impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
