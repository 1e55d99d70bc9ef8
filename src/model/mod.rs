//! The `glm_moe_dsa` model: loading, layers, forward pass.

pub mod ops;
