//! Orders shards by how much of them is read.

use crate::arch::Architecture;
use crate::model::prediction;
use crate::shards::Shards;
use crate::stream::Catalog;
use crate::stream::usage::{self, Identity, Usage};

/// The shards of a model, hottest first, as indices of [`Shards::files`]: by how many bytes of experts were read from each, for each of
/// its bytes. Without a history of use it is their own order.
pub fn hotness(shards: &Shards) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shards.files().len()).collect();
    if let Some(heat) = heat(shards) {
        order.sort_by(|a, b| heat[*b].total_cmp(&heat[*a]));
    }
    order
}

/// The heat of every shard, if the model has experts and a history.
fn heat(shards: &Shards) -> Option<Vec<f64>> {
    let dir = shards.dirs().first()?;
    let arch = Architecture::load(dir).ok()?;
    let arch = prediction(shards, &arch).unwrap_or(arch);
    let catalog = Catalog::new(shards, &arch).ok()?;
    let usage = usage::read(dir, &Identity::of(shards, &arch))?;
    Some(spread(shards, &catalog, &usage))
}

fn spread(shards: &Shards, catalog: &Catalog, usage: &Usage) -> Vec<f64> {
    let mut heat = vec![0.0; shards.files().len()];
    for layer in catalog.layers() {
        for expert in 0..catalog.experts() as u32 {
            let count = f64::from(usage.count(layer, expert));
            for matrix in catalog.expert(layer, expert).iter().flatten() {
                heat[matrix.file] += count * matrix.bytes as f64;
                heat[matrix.scales.file] += count * matrix.scales.bytes as f64;
            }
        }
    }
    let sizes = shards.files().iter().map(|file| file.size().max(1) as f64);
    heat.iter_mut()
        .zip(sizes)
        .for_each(|(heat, size)| *heat /= size);
    heat
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_shard_with_the_experts_that_are_used_comes_first() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/bf16-shared");
        let arch = Architecture::load(&dir).unwrap();
        let shards = Shards::open(&[dir]).unwrap();
        let catalog = Catalog::new(&shards, &arch).unwrap();
        for hottest in 0..shards.files().len() {
            let layers: Vec<usize> = catalog.layers().collect();
            let mut usage = Usage::new(layers.clone(), catalog.experts(), 1);
            for layer in layers {
                for expert in 0..catalog.experts() as u32 {
                    let matrices = catalog.expert(layer, expert).unwrap();
                    // No expert of this model lies in one shard alone.
                    let here = matrices.iter().filter(|m| m.file == hottest).count();
                    if here >= 2 {
                        usage.record(layer, &[expert]);
                    }
                }
            }
            assert!(usage.tokens() > 0, "the shard has most of some experts");
            let heat = spread(&shards, &catalog, &usage);
            let others = (0..heat.len()).filter(|i| *i != hottest);
            assert!(
                others.map(|i| heat[i]).all(|h| h < heat[hottest]),
                "{heat:?}"
            );
        }
    }
}
