//! The vector functions between the matrix products. Each has one fixed order of operations, so that its result
//! depends on its input alone.

use crate::quant::dot;

/// out = x / sqrt(mean(x^2) + eps) * weight.
///
/// # Panics
/// When the lengths differ.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), x.len()), (weight.len(), out.len()));
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// As [`rms_norm`], with the result in the place of `x`.
///
/// # Panics
/// When the lengths differ.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = *x * scale * weight;
    }
}

/// out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, with the variance of a population (divided by n).
///
/// # Panics
/// When the lengths differ.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), x.len()), (weight.len(), bias.len()));
    assert_eq!(x.len(), out.len());
    // In f64 the two passes over a short vector are cheap, and cancellation around a large mean is harmless.
    let count = x.len() as f64;
    let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let variance = x
        .iter()
        .map(|&x| (f64::from(x) - mean).powi(2))
        .sum::<f64>()
        / count;
    let scale = 1.0 / (variance + f64::from(eps)).sqrt();
    for (((out, &x), weight), bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
        *out = ((f64::from(x) - mean) * scale) as f32 * weight + bias;
    }
}

/// x = exp(x) / sum(exp(x)). A value of minus infinity is a masked position and becomes 0; when all are, all become 0.
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY && !x.iter().any(|x| x.is_nan()) {
        return x.fill(0.0);
    }
    let mut sum = 0f64;
    for x in x.iter_mut() {
        *x = (*x - max).exp();
        sum += f64::from(*x);
    }
    let scale = (1.0 / sum) as f32;
    for x in x.iter_mut() {
        *x *= scale;
    }
}

/// The softmax of `x` and one more value, `sink`, which takes its share of the sum.
pub fn softmax_with(x: &mut [f32], sink: f32) {
    let max = x.iter().copied().fold(sink, f32::max);
    let mut sum = f64::from((sink - max).exp());
    for x in x.iter_mut() {
        *x = (*x - max).exp();
        sum += f64::from(*x);
    }
    let scale = (1.0 / sum) as f32;
    for x in x.iter_mut() {
        *x *= scale;
    }
}

/// 1 / (1 + exp(-x)).
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// x * sigmoid(x), written so that large negative values give -0 rather than a NaN.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// gate = silu(gate) * up, the activation of an expert.
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}

/// out = gate * sigmoid(alpha * gate) * (up + 1) of pairs of gate and up, with the gate at most `limit`, and up between -`limit` and
/// `limit`.
///
/// # Panics
/// When there are not as many pairs as outputs.
pub fn clamped_swiglu(pairs: &[f32], alpha: f32, limit: f32, out: &mut [f32]) {
    let (pairs, []) = pairs.as_chunks::<2>() else {
        panic!("a gate without an up");
    };
    assert_eq!(pairs.len(), out.len());
    for (out, [gate, up]) in out.iter_mut().zip(pairs) {
        let (gate, up) = (at_most(*gate, limit), at_most(*up, limit));
        let up = if up < -limit { -limit } else { up };
        *out = (up + 1.0) * (gate * sigmoid(gate * alpha));
    }
}

/// The lesser of the two; NaN stays, so that it is noticed.
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// The index of the first value that is infinite or NaN.
pub fn first_not_finite(x: &[f32]) -> Option<usize> {
    let infinite = |x: &f32| x.to_bits() & 0x7f80_0000 == 0x7f80_0000;
    // Pieces without a branch become vector instructions.
    let mut pieces = x.chunks(4096);
    let piece = pieces.position(|piece| piece.iter().fold(false, |any, x| any | infinite(x)))?;
    let start = 4096 * piece;
    x[start..].iter().position(infinite).map(|at| start + at)
}

/// The index of the largest value, ties to the lowest; NaN and minus infinity never win. `None` when there is no other value.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut max = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > max {
            (best, max) = (Some(id as u32), logit);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(value: f32, exact: f64) -> bool {
        (f64::from(value) - exact).abs() <= 1e-6 * exact.abs().max(1e-2)
    }

    #[test]
    fn the_first_value_that_is_no_number_is_found() {
        let mut x = vec![f32::MAX; 10_000];
        assert_eq!(first_not_finite(&x), None);
        (x[9_000], x[8_192]) = (f32::NAN, f32::NEG_INFINITY);
        assert_eq!(first_not_finite(&x), Some(8_192));
        assert_eq!(first_not_finite(&x[8_193..]), Some(807));
        assert_eq!(first_not_finite(&[]), None);
    }

    fn vector() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(-8f32..8.0, 1..300)
    }

    proptest! {
        #[test]
        fn norms_match_f64(x in vector()) {
            let n = x.len() as f64;
            let weight: Vec<f32> = (0..x.len()).map(|i| 0.5 + (i % 7) as f32 / 8.0).collect();
            let bias: Vec<f32> = (0..x.len()).map(|i| (i % 5) as f32 / 8.0).collect();
            let mut out = vec![0f32; x.len()];

            rms_norm(&x, &weight, 1e-5, &mut out);
            let square = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
            for i in 0..x.len() {
                let exact = f64::from(x[i]) / (square + 1e-5).sqrt() * f64::from(weight[i]);
                prop_assert!(close(out[i], exact), "{} {exact}", out[i]);
            }

            let mut normed = x.clone();
            rms_norm_in_place(&mut normed, &weight, 1e-5);
            prop_assert_eq!(&normed, &out);

            layer_norm(&x, &weight, &bias, 1e-6, &mut out);
            let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
            for i in 0..x.len() {
                let unit = (f64::from(x[i]) - mean) / (variance + f64::from(1e-6f32)).sqrt();
                let exact = unit * f64::from(weight[i]) + f64::from(bias[i]);
                // The two terms may cancel.
                let error = (f64::from(out[i]) - exact).abs();
                prop_assert!(error <= 1e-6 * (1.0 + unit.abs()), "{} {exact}", out[i]);
            }
        }

        #[test]
        fn softmax_matches_f64(x in vector()) {
            let mut out = x.clone();
            softmax(&mut out);
            let sum: f64 = x.iter().map(|&x| f64::from(x).exp()).sum();
            for (out, x) in out.iter().zip(&x) {
                prop_assert!(close(*out, f64::from(*x).exp() / sum));
            }
        }

        #[test]
        fn a_sink_is_one_more_value(x in vector(), sink in -8f32..8.0) {
            let mut all = x.clone();
            all.push(sink);
            softmax(&mut all);
            let mut out = x.clone();
            softmax_with(&mut out, sink);
            for (out, all) in out.iter().zip(&all) {
                prop_assert!(close(*out, f64::from(*all)));
            }
        }

        #[test]
        fn activations_match_f64(x in -100f32..100.0) {
            let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
            prop_assert!(close(sigmoid(x), exact));
            prop_assert!(close(silu(x), f64::from(x) * exact));
        }
    }

    #[test]
    fn edges() {
        assert_eq!(silu(f32::MIN), 0.0);
        assert_eq!(silu(200.0), 200.0);
        assert_eq!((sigmoid(-200.0), sigmoid(200.0)), (0.0, 1.0));

        let mut x = [f32::NEG_INFINITY, 1000.0, f32::NEG_INFINITY, 1000.0];
        softmax(&mut x);
        assert_eq!(x, [0.0, 0.5, 0.0, 0.5]);
        let mut x = [f32::NEG_INFINITY; 3];
        softmax(&mut x);
        assert_eq!(x, [0.0; 3]);
        softmax(&mut []);
        let mut x = [f32::NAN, f32::NEG_INFINITY];
        softmax(&mut x);
        assert!(x[0].is_nan());

        let mut out = [0f32; 2];
        rms_norm(&[0.0, 0.0], &[1.0, 1.0], 1e-5, &mut out);
        assert_eq!(out, [0.0; 2]);
        let mut out = [0f32; 4];
        clamped_swiglu(
            &[9.0, 9.0, -9.0, -9.0, 2.0, 3.0, f32::NAN, 0.0],
            1.702,
            7.0,
            &mut out,
        );
        let glu = |gate: f32| gate * sigmoid(1.702 * gate);
        assert_eq!(out[..3], [8.0 * glu(7.0), -6.0 * glu(-9.0), 4.0 * glu(2.0)]);
        assert!(out[3].is_nan());

        let mut gate = [1.0, -2.0];
        silu_mul(&mut gate, &[3.0, 0.5]);
        assert_eq!(gate, [silu(1.0) * 3.0, silu(-2.0) * 0.5]);
    }
}
