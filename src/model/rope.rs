//! Rotates queries and keys by their position (RoPE).

use std::f64::consts::PI;

use crate::arch::{self, Yarn};

/// Cosine and sine of one pair's angle.
pub type Angle = [f32; 2];

/// The frequencies of a model.
#[derive(Debug)]
pub struct Rope {
    inverse: Vec<f32>,
    /// Factor on cosine and sine.
    amplitude: f32,
}

impl Rope {
    /// Frequencies theta^(-2i / dims) for pair i, with their scaling.
    pub fn new(rope: &arch::Rope) -> Rope {
        let dims = rope.dims;
        // Rounded to f32 where the reference rounds: the power, its inverse, and the angle. At large
        // positions the rounding of the frequency moves the angle by far more than that of the sine.
        let power = |i| rope.theta.powf(f64::from((2 * i) as f32 / dims as f32)) as f32;
        let powers = (0..dims / 2).map(power);
        let Some(yarn) = &rope.scaling else {
            return Rope {
                inverse: powers.map(|power| 1.0 / power).collect(),
                amplitude: 1.0,
            };
        };
        let (low, high) = blended(yarn, rope.theta, dims);
        let inverse = |(i, power): (usize, f32)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let stays = 1.0 - ramp;
            1.0 / (yarn.factor as f32 * power) * (1.0 - stays) + 1.0 / power * stays
        };
        Rope {
            inverse: powers.enumerate().map(inverse).collect(),
            amplitude: yarn.amplitude as f32,
        }
    }

    /// The angles of position `position`, one a pair, appended to `angles`.
    pub fn angles(&self, position: usize, angles: &mut Vec<Angle>) {
        let position = position as f32;
        angles.extend(self.inverse.iter().map(|f| {
            let (sin, cos) = f64::from(position * f).sin_cos();
            [cos as f32 * self.amplitude, sin as f32 * self.amplitude]
        }));
    }
}

/// The pairs between which frequencies are blended: those before the first stay, those after the second are divided by the factor.
fn blended(yarn: &Yarn, theta: f64, dims: usize) -> (f64, f64) {
    let pair = |rotations: f64| {
        let wave = yarn.original_length as f64 / (rotations * 2.0 * PI);
        dims as f64 * wave.ln() / (2.0 * theta.ln())
    };
    let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min((dims - 1) as f64));
    // As in the reference, which avoids a division by zero so.
    if low == high {
        high += 0.001;
    }
    (low, high)
}

/// Rotates the first `2 * angles.len()` values of `x` in place. Pairs are neighbours: 2i and 2i + 1.
pub fn rotate(x: &mut [f32], angles: &[Angle]) {
    for (pair, [cos, sin]) in x.chunks_exact_mut(2).zip(angles) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * cos - b * sin;
        pair[1] = b * cos + a * sin;
    }
}

/// Rotates the first `2 * angles.len()` values of `x` in place. Pairs are i and i + `angles.len()`.
pub fn rotate_halves(x: &mut [f32], angles: &[Angle]) {
    let (first, second) = x.split_at_mut(angles.len());
    for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(angles) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::RopeLayout;

    fn plain(theta: f64, dims: usize) -> Rope {
        let scaling = None;
        Rope::new(&arch::Rope {
            theta,
            dims,
            layout: RopeLayout::Interleaved,
            scaling,
        })
    }

    #[test]
    fn rotates_pairs_and_leaves_the_rest() {
        let rope = plain(10_000.0, 4);
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
    fn both_layouts_rotate_the_same_pairs() {
        let mut angles = Vec::new();
        plain(50.0, 6).angles(7, &mut angles);
        let mut pairs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let mut halves = [1.0, 3.0, 5.0, 2.0, 4.0, 6.0, 7.0];
        rotate(&mut pairs, &angles);
        rotate_halves(&mut halves, &angles);
        let [a, b, c, d, e, f, rest] = pairs;
        assert_eq!(halves, [a, c, e, b, d, f, rest]);
    }

    #[test]
    fn position_zero_changes_nothing() {
        let mut angles = Vec::new();
        plain(8e6, 6).angles(0, &mut angles);
        let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rotate(&mut x, &angles);
        assert_eq!(x, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn scores_depend_on_the_distance_alone() {
        let rope = plain(100.0, 8);
        let rotated = |position| {
            let (mut angles, mut x) = (Vec::new(), [0.5, -1.0, 2.0, 0.25, 1.0, 1.0, -3.0, 0.125]);
            rope.angles(position, &mut angles);
            rotate(&mut x, &angles);
            x
        };
        let score = |p, q| -> f32 { rotated(p).iter().zip(rotated(q)).map(|(a, b)| a * b).sum() };
        assert!((score(5, 2) - score(105, 102)).abs() < 1e-4);
    }

    /// Compared with `_compute_yarn_parameters` of transformers for DeepSeek-V3's published values.
    #[test]
    fn yarn_divides_low_frequencies() {
        let rope = Rope::new(&arch::Rope {
            theta: 10_000.0,
            dims: 64,
            layout: RopeLayout::Interleaved,
            scaling: Some(Yarn {
                factor: 40.0,
                original_length: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                amplitude: 1.0,
                score_scale: 1.0,
            }),
        });
        let expected = [
            (0, 1.0),
            (9, 0.074989416),
            (10, 0.05623413),
            (11, 0.039006926),
            (16, 0.0055000004),
            (20, 0.0007905694),
            (24, 2.5e-05),
            (31, 3.3338035e-06),
        ];
        for (i, value) in expected {
            assert_eq!(rope.inverse[i], value, "pair {i}");
        }
    }
}
