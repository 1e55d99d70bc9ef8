//! Computes a projection with an optional bias.

use crate::pool::Pool;
use crate::weight::{Loader, Weight, WeightError};

/// W x + b.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Loads `{name}.weight` [rows, cols] and, if `bias`, `{name}.bias` [rows].
    pub fn load(
        loader: &mut Loader,
        name: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> Result<Linear, WeightError> {
        Ok(Linear {
            weight: loader.matrix(&format!("{name}.weight"), rows, cols)?,
            bias: bias
                .then(|| loader.vector(&format!("{name}.bias"), rows))
                .transpose()?,
        })
    }

    /// `y` [n, rows] of `x` [n, cols].
    pub fn forward(&self, pool: &Pool, x: &[f32], n: usize, y: &mut [f32]) {
        self.weight.matrix().matmul(pool, x, n, y);
        if let Some(bias) = &self.bias {
            for y in y.chunks_mut(bias.len()) {
                y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}
