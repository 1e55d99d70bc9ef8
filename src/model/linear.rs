//! Computes a projection with an optional bias.

use crate::arch::TensorId;
use crate::pool::Pool;
use crate::weight::{Loader, Weight, WeightError};

/// W x + b.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Loads the matrix and the bias, if the projection has one.
    pub fn load(
        loader: &mut Loader,
        weight: TensorId,
        bias: Option<TensorId>,
    ) -> Result<Linear, WeightError> {
        Ok(Linear {
            weight: loader.matrix(weight)?,
            bias: bias.map(|bias| loader.vector(bias)).transpose()?,
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
