//! Selects the largest values of a list, for the router and the indexer.

use std::cmp::Ordering;

/// The indices of the `k` largest of `values`, ascending, left in `picked`. Ties go to the lowest index, so the
/// choice is always the same. All indices when there are at most `k`.
pub fn top_k(values: &[f32], k: usize, picked: &mut Vec<u32>) {
    picked.clear();
    picked.extend(0..values.len() as u32);
    if k < values.len() {
        if k > 0 {
            picked.select_nth_unstable_by(k - 1, |a, b| {
                better(values[*a as usize], values[*b as usize]).then(a.cmp(b))
            });
        }
        picked.truncate(k);
        picked.sort_unstable();
    }
}

/// Larger first. A total order, so that a NaN cannot make the selection panic; -0 and +0 are equal.
fn better(a: f32, b: f32) -> Ordering {
    (b + 0.0).total_cmp(&(a + 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(values: &[f32], k: usize) -> Vec<u32> {
        let mut picked = vec![9; 3];
        top_k(values, k, &mut picked);
        picked
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        assert_eq!(top(&[1.0, 2.0, 2.0, 2.0, 0.0], 2), [1, 2]);
        assert_eq!(top(&[2.0, 1.0, 1.0, 1.0, 3.0], 3), [0, 1, 4]);
        assert_eq!(top(&[0.0; 6], 4), [0, 1, 2, 3]);
        assert_eq!(top(&[-0.0, 0.0, -0.0], 1), [0]);
    }

    #[test]
    fn edges() {
        assert_eq!(top(&[1.0, 2.0], 5), [0, 1]);
        assert_eq!(top(&[1.0, 2.0], 2), [0, 1]);
        assert_eq!(top(&[1.0, 2.0], 0), [0u32; 0]);
        assert_eq!(top(&[], 3), [0u32; 0]);
        assert_eq!(top(&[f32::NEG_INFINITY, -1.0, f32::NAN], 2).len(), 2);
    }

    proptest::proptest! {
        #[test]
        fn equals_a_stable_sort(values in proptest::collection::vec(-4i8..4, 0..40), k in 0usize..40) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let mut sorted: Vec<u32> = (0..values.len() as u32).collect();
            sorted.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]));
            sorted.truncate(k);
            sorted.sort();
            proptest::prop_assert_eq!(top(&values, k), sorted);
        }
    }
}
