//! Chooses the kernels of a format for the CPU, at run time.

use super::Format;
use super::float;
use super::kernel::{Isa, Kernel};
use super::packed::integer::{self, IntegerKernel};
use super::packed::{self, BLOCK, FINE, Fp4, Fp8, GROUP, GROUP_BF16, HALF, Int2, Int4, Int8, ROW};

/// The kernels of `format` on this CPU.
pub(super) fn kernel(format: Format) -> &'static dyn Kernel {
    kernel_for(format, Isa::chosen())
}

/// The kernels of `format` on `isa`.
pub(super) fn kernel_for(format: Format, isa: Isa) -> &'static dyn Kernel {
    match format {
        Format::F32 => float::kernel::<float::F32>(isa),
        Format::F16 => float::kernel::<float::F16>(isa),
        Format::Bf16 => float::kernel::<float::Bf16>(isa),
        Format::Int8Row => packed::kernel::<Int8, ROW>(isa),
        Format::Int4Row => packed::kernel::<Int4, ROW>(isa),
        Format::Int2Row => packed::kernel::<Int2, ROW>(isa),
        Format::Fp8Block => packed::kernel::<Fp8, GROUP>(isa),
        Format::Fp8BlockBf16 => packed::kernel::<Fp8, GROUP_BF16>(isa),
        Format::Mxfp4 => packed::kernel::<Fp4, HALF>(isa),
        Format::Int4Group(size) if size > 0 && (size as usize).is_multiple_of(BLOCK) => {
            packed::kernel::<Int4, GROUP>(isa)
        }
        Format::Int4Group(_) => packed::kernel::<Int4, FINE>(isa),
    }
}

/// The integer kernels of `format` on this CPU; `None` for formats that are always computed exactly.
pub(super) fn integer_kernel(format: Format) -> Option<&'static dyn IntegerKernel> {
    integer_kernel_for(format, Isa::chosen())
}

/// The integer kernels of `format` on `isa`, where it has any.
pub(super) fn integer_kernel_for(format: Format, isa: Isa) -> Option<&'static dyn IntegerKernel> {
    match format {
        Format::Int8Row => Some(integer::kernel::<Int8, ROW>(isa)),
        Format::Int4Row => Some(integer::kernel::<Int4, ROW>(isa)),
        Format::Int2Row => Some(integer::kernel::<Int2, ROW>(isa)),
        Format::Int4Group(size) if size > 0 && (size as usize).is_multiple_of(BLOCK) => {
            Some(integer::kernel::<Int4, GROUP>(isa))
        }
        _ => None,
    }
}
