//! Turns tensors into weights: finds them by name, checks shape and type, and reads or quantises them.

mod counts;
mod damage;
mod error;
mod load;
mod matrix;
mod quantised;
mod role;
mod rows;
mod seen;
mod stored;
#[cfg(test)]
mod tests;
mod whole;

pub use counts::{Count, Counts};
pub use damage::{Damage, Zeros};
pub(crate) use damage::{check_read, check_sample};
pub use error::WeightError;
pub use load::{Loader, resident_bytes};
pub use matrix::Weight;
pub use quantised::{Quantised, packing_of, quantise};
pub use role::{Role, activations_of, role};
pub use rows::{Block, Piece, Rows, RowsError};
pub(crate) use seen::Seen;
pub use stored::{
    Matrices, Stored, codes_name, floats, id_of, is_stored, owner_of_scales, scales_name,
};
pub use whole::{findings, has_indexer, has_indexers, with_prediction};
