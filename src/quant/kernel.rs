//! What a weight format provides, and the instruction sets that it may be written for.

use std::borrow::Cow;
use std::sync::OnceLock;

use super::Matrix;

/// The products of one format on one instruction set, on one thread.
pub trait Kernel: Sync {
    /// The vectors `x` [n, cols] in the order in which [`Kernel::matmul`] takes them. Done once for a product, not once
    /// for each of its tiles.
    fn arrange<'x>(&self, x: &'x [f32], _cols: usize) -> Cow<'x, [f32]> {
        Cow::Borrowed(x)
    }

    /// y[c][r] = W[r, :] . x[c] for all rows of `w` and all columns, in the reduction order of [`super`]. `x` is
    /// [y.len(), cols] row-major, as [`Kernel::arrange`] left it; every element of `y` has `w.rows` values.
    fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [&mut [f32]]);

    /// y[j] += a[r] * W[r, j], one fused multiply-add each, for all rows r of `w`, ascending. `a` has `w.rows` values, `y` has `w.cols`.
    fn add_rows(&self, w: Matrix<'_>, a: &[f32], y: &mut [f32]);
}

/// The one that products use.
static BEST: OnceLock<Isa> = OnceLock::new();

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Any CPU.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F on top of [`Isa::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// What this CPU has, best last.
    pub fn available() -> Vec<Isa> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
        let mut all = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            all.push(Isa::Avx2);
            if is_x86_feature_detected!("avx512f") {
                all.push(Isa::Avx512);
            }
        }
        all
    }

    /// The one that products use: the best, looked up once.
    pub(super) fn best() -> Isa {
        *BEST.get_or_init(|| Isa::available().last().copied().unwrap_or(Isa::Portable))
    }

    /// Makes products use this one instead of the best, for measuring. False when the CPU does not have it, or when another one is in
    /// use already: to be called before the first product.
    pub fn impose(self) -> bool {
        Isa::available().contains(&self) && *BEST.get_or_init(|| self) == self
    }
}
