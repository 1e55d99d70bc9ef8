//! What a weight format provides, and the choice of instruction set at run time.

use std::borrow::Cow;
use std::sync::OnceLock;

use super::float;
use super::packed::{self, BLOCK, FINE, Fp8, GROUP, Int2, Int4, Int8, ROW};
use super::{Format, Matrix};

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

    /// The best one, looked up once.
    fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::available().last().copied().unwrap_or(Isa::Portable))
    }
}

/// The kernels of `format` on this CPU.
pub fn kernel(format: Format) -> &'static dyn Kernel {
    kernel_for(format, Isa::best())
}

/// The kernels of `format` on `isa`, which the CPU must have: take it from [`Isa::available`].
pub fn kernel_for(format: Format, isa: Isa) -> &'static dyn Kernel {
    match format {
        Format::F32 => float::kernel::<float::F32>(isa),
        Format::F16 => float::kernel::<float::F16>(isa),
        Format::Bf16 => float::kernel::<float::Bf16>(isa),
        Format::Int8Row => packed::kernel::<Int8, ROW>(isa),
        Format::Int4Row => packed::kernel::<Int4, ROW>(isa),
        Format::Int2Row => packed::kernel::<Int2, ROW>(isa),
        Format::Fp8Block => packed::kernel::<Fp8, GROUP>(isa),
        Format::Int4Group(size) if size > 0 && (size as usize).is_multiple_of(BLOCK) => {
            packed::kernel::<Int4, GROUP>(isa)
        }
        Format::Int4Group(_) => packed::kernel::<Int4, FINE>(isa),
    }
}
