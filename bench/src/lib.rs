//! Benches and storage experiments of colibri-uring. Each bench is a file under `benches/`.
