//! Defines the element types of the safetensors format.

use std::fmt;

/// Defines [`Dtype`] with each type's width and spellings in one table.
macro_rules! dtypes {
    ($($(#[doc = $doc:literal])+ $variant:ident, $bits:literal, $name:literal $(| $alias:literal)*;)+) => {
        /// Element type of a tensor, as its header names it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Dtype {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Dtype {
            /// Every type.
            pub const ALL: &[Dtype] = &[$(Dtype::$variant),+];

            /// The type of a header's spelling, aliases included.
            pub fn parse(name: &str) -> Option<Dtype> {
                match name {
                    $($name $(| $alias)* => Some(Dtype::$variant),)+
                    _ => None,
                }
            }

            /// The format's own spelling.
            pub fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => $name,)+
                }
            }

            /// Width of one element in bits.
            pub fn bits(self) -> u64 {
                match self {
                    $(Dtype::$variant => $bits,)+
                }
            }
        }
    };
}

dtypes! {
    /// Boolean, a byte each.
    Bool, 8, "BOOL";
    /// 4-bit float of the OCP microscaling formats (e2m1).
    F4, 4, "F4";
    /// 6-bit float of the OCP microscaling formats, 2 exponent bits.
    F6E2M3, 6, "F6_E2M3";
    /// 6-bit float of the OCP microscaling formats, 3 exponent bits.
    F6E3M2, 6, "F6_E3M2";
    /// Unsigned byte.
    U8, 8, "U8";
    /// Signed byte.
    I8, 8, "I8";
    /// 8-bit float, 5 exponent bits.
    F8E5M2, 8, "F8_E5M2" | "float8_e5m2";
    /// 8-bit float, 4 exponent bits, finite only.
    F8E4M3, 8, "F8_E4M3" | "F8_E4M3FN" | "float8_e4m3fn";
    /// Power of two, the scale of the OCP microscaling formats.
    F8E8M0, 8, "F8_E8M0" | "F8_E8M0FNU" | "float8_e8m0fnu";
    /// 8-bit float, 4 exponent bits, finite, no negative zero.
    F8E4M3Fnuz, 8, "F8_E4M3FNUZ" | "float8_e4m3fnuz";
    /// 8-bit float, 5 exponent bits, finite, no negative zero.
    F8E5M2Fnuz, 8, "F8_E5M2FNUZ" | "float8_e5m2fnuz";
    /// Signed 16-bit integer.
    I16, 16, "I16";
    /// Unsigned 16-bit integer.
    U16, 16, "U16";
    /// IEEE half.
    F16, 16, "F16";
    /// bfloat16.
    Bf16, 16, "BF16";
    /// Signed 32-bit integer.
    I32, 32, "I32";
    /// Unsigned 32-bit integer.
    U32, 32, "U32";
    /// 32-bit float.
    F32, 32, "F32";
    /// Complex number of two 32-bit floats.
    C64, 64, "C64";
    /// 64-bit float.
    F64, 64, "F64";
    /// Signed 64-bit integer.
    I64, 64, "I64";
    /// Unsigned 64-bit integer.
    U64, 64, "U64";
}

impl Dtype {
    /// Bytes of `elements` elements, packed without padding. `None` if that overflows or is not a whole number of bytes.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_the_format_is_known_with_its_width() {
        use safetensors::Dtype as S;
        let format = [
            S::BOOL,
            S::F4,
            S::F6_E2M3,
            S::F6_E3M2,
            S::U8,
            S::I8,
            S::F8_E5M2,
            S::F8_E4M3,
            S::F8_E8M0,
            S::F8_E4M3FNUZ,
            S::F8_E5M2FNUZ,
            S::I16,
            S::U16,
            S::F16,
            S::BF16,
            S::I32,
            S::U32,
            S::F32,
            S::C64,
            S::F64,
            S::I64,
            S::U64,
        ];
        assert_eq!(format.len(), Dtype::ALL.len());
        for dtype in format {
            let ours = Dtype::parse(&dtype.to_string()).unwrap();
            assert_eq!(ours.name(), dtype.to_string());
            assert_eq!(ours.bits(), dtype.bitsize() as u64);
        }
    }

    #[test]
    fn aliases() {
        for name in ["F8_E4M3FN", "float8_e4m3fn"] {
            assert_eq!(Dtype::parse(name), Some(Dtype::F8E4M3));
        }
        assert_eq!(Dtype::parse("F8_E8M0FNU"), Some(Dtype::F8E8M0));
        for name in ["", "f32", "F128", "BF16 "] {
            assert_eq!(Dtype::parse(name), None);
        }
    }

    #[test]
    fn bytes_of_elements() {
        assert_eq!(Dtype::F32.bytes(3), Some(12));
        assert_eq!(Dtype::F4.bytes(4), Some(2));
        assert_eq!(Dtype::F4.bytes(3), None);
        assert_eq!(Dtype::F6E2M3.bytes(4), Some(3));
        assert_eq!(Dtype::F64.bytes(u64::MAX / 8), None);
        assert_eq!(Dtype::U8.bytes(0), Some(0));
    }
}
