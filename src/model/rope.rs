//! Rotates queries and keys by their position (RoPE), on interleaved pairs (2i, 2i + 1).

/// Cosine and sine of one pair's angle.
pub type Angle = [f32; 2];

/// The frequencies of a model.
#[derive(Debug)]
pub struct Rope {
    inverse: Vec<f32>,
}

impl Rope {
    /// Frequencies theta^(-2i / dim) for `dim` rotated dimensions (even).
    pub fn new(theta: f64, dim: usize) -> Rope {
        // Rounded to f32 where the reference rounds: the power, its inverse, and the angle. At large
        // positions the rounding of the frequency moves the angle by far more than that of the sine.
        let inverse = |i| 1.0 / theta.powf(f64::from((2 * i) as f32 / dim as f32)) as f32;
        Rope {
            inverse: (0..dim / 2).map(inverse).collect(),
        }
    }

    /// The angles of position `position`, one a pair, appended to `angles`.
    pub fn angles(&self, position: usize, angles: &mut Vec<Angle>) {
        let position = position as f32;
        angles.extend(self.inverse.iter().map(|f| {
            let (sin, cos) = f64::from(position * f).sin_cos();
            [cos as f32, sin as f32]
        }));
    }
}

/// Rotates the first `2 * angles.len()` values of `x`, pair by pair, in place.
pub fn rotate(x: &mut [f32], angles: &[Angle]) {
    for (pair, [cos, sin]) in x.chunks_exact_mut(2).zip(angles) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * cos - b * sin;
        pair[1] = b * cos + a * sin;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotates_pairs_and_leaves_the_rest() {
        let rope = Rope::new(10_000.0, 4);
        assert_eq!(rope.inverse, [1.0, 0.01]);
        let mut angles = Vec::new();
        rope.angles(3, &mut angles);
        let mut x = [1.0, 0.0, 0.0, 1.0, 7.0];
        rotate(&mut x, &angles);
        let expected = [3f32.cos(), 3f32.sin(), -(0.03f32.sin()), 0.03f32.cos(), 7.0];
        for (x, e) in x.iter().zip(expected) {
            assert!((x - e).abs() < 1e-6, "{x} {e}");
        }
    }

    #[test]
    fn position_zero_changes_nothing() {
        let mut angles = Vec::new();
        Rope::new(8e6, 6).angles(0, &mut angles);
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rotate(&mut x, &angles);
        assert_eq!(x, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn scores_depend_on_the_distance_alone() {
        let rope = Rope::new(100.0, 8);
        let rotated = |position| {
            let (mut angles, mut x) = (Vec::new(), [0.5, -1.0, 2.0, 0.25, 1.0, 1.0, -3.0, 0.125]);
            rope.angles(position, &mut angles);
            rotate(&mut x, &angles);
            x
        };
        let score = |p, q| -> f32 { rotated(p).iter().zip(rotated(q)).map(|(a, b)| a * b).sum() };
        assert!((score(5, 2) - score(105, 102)).abs() < 1e-4);
    }
}
