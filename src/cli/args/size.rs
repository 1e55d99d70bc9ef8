//! Parses sizes with units.

use std::str::FromStr;

use bytesize::ByteSize;

/// A number of bytes, written `19MiB`, `24GiB`, `1.5GB` or `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        // `ByteSize` takes a number without a unit for bytes, and rounds one that is too large down to the largest.
        match ByteSize::from_str(text.trim()) {
            Ok(size) if size.0 < u64::MAX => Ok(Size(size.0)),
            Ok(_) => Err(format!("{text} is more bytes than can be counted")),
            Err(_) => {
                Err("a size is a number and a unit, like 24GiB, 19MiB, 1.5GB or 4096".to_owned())
            }
        }
    }
}

/// Parses the size of a memory budget. Refuses a small number without a unit, which is unlikely to be bytes.
pub fn memory(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    let bare = text.trim().bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if bare && size.0 > 0 && size.0 < 1 << 20 {
        return Err(format!(
            "{text} is a number of bytes; did you mean {text}GiB?"
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_binary_or_decimal() {
        for (text, bytes) in [
            ("4096", 4096),
            ("0", 0),
            ("19MiB", 19 << 20),
            ("24GiB", 24 << 30),
            ("24 GiB", 24 << 30),
            ("24gib", 24 << 30),
            ("1.5GB", 1_500_000_000),
            ("0.5KiB", 512),
            ("1TiB", 1 << 40),
            ("7B", 7),
            ("2kB", 2000),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "",
            "GiB",
            "-1",
            "-1GiB",
            "1.2.3MB",
            "nan",
            "inf",
            "1e3",
            "12 parsecs",
            "99999999999EiB",
            "1,5GB",
            "٣MiB",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
