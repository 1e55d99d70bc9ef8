//! Benches and storage experiments of colibri-uring. Each bench is a file under `benches/`; the SSDs that storage
//! experiments need are made by [`lab`].

pub mod binary;
pub mod fio;
pub mod lab;
pub mod load;
pub mod policies;

/// The middle one, or the mean of the two in the middle; at least one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}
