//! Sorts the rows of a batch by the experts that they use.

use std::ops::Range;

use crate::model::router::Choice;
use crate::quant::axpy;

/// A token that chose an expert.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoutedToken {
    /// Row of the token in the batch.
    pub row: usize,
    /// Factor on the expert's output.
    pub weight: f32,
}

/// The tokens that chose each expert: expert by expert, rows ascending. The slots of outputs have the same order.
#[derive(Debug, Default)]
pub struct ExpertAssignments {
    /// Where each expert's tokens start; one more at the end.
    starts: Vec<usize>,
    tokens: Vec<RoutedToken>,
}

impl ExpertAssignments {
    /// Sorts the choices [rows, top_k] by expert.
    pub fn collect(&mut self, choices: &[Choice], top_k: usize, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 2, 0);
        // Counted two places up, so that after the sums `starts[e + 1]` is the start of e: it moves to the end of
        // e, which is the start of e + 1, as the tokens are placed.
        for choice in choices {
            self.starts[choice.expert as usize + 2] += 1;
        }
        for e in 2..self.starts.len() {
            self.starts[e] += self.starts[e - 1];
        }
        self.tokens.clear();
        self.tokens.resize(choices.len(), RoutedToken::default());
        for (i, choice) in choices.iter().enumerate() {
            let at = &mut self.starts[choice.expert as usize + 1];
            self.tokens[*at] = RoutedToken {
                row: i / top_k,
                weight: choice.weight,
            };
            *at += 1;
        }
        self.starts.pop();
    }

    /// The tokens of an expert; none for an id beyond the last expert.
    pub fn of(&self, expert: usize) -> &[RoutedToken] {
        match self.starts.get(expert..expert + 2) {
            Some(&[start, end]) => &self.tokens[start..end],
            _ => &[],
        }
    }

    /// The slots of `experts`, counted from the first slot of `group`; none when they are outside of it.
    pub fn slots(&self, group: Range<usize>, experts: Range<usize>) -> Range<usize> {
        if experts.start < group.start || experts.end > group.end {
            return 0..0;
        }
        let base = self.starts[group.start];
        self.starts[experts.start] - base..self.starts[experts.end] - base
    }

    /// The longest range of experts from `first` on that has at most `slots` tokens, or one expert with more.
    /// Empty when no expert from `first` on has tokens.
    pub fn group(&self, first: usize, slots: usize) -> Range<usize> {
        let experts = self.starts.len() - 1;
        let used = |e: &usize| !self.of(*e).is_empty();
        let Some(first) = (first..experts).find(used) else {
            return experts..experts;
        };
        let limit = self.starts[first] + slots;
        let end = (first + 1..experts).find(|e| self.starts[e + 1] > limit);
        first..end.unwrap_or(experts)
    }

    /// The experts of `group` that have tokens, ascending.
    pub fn ids(&self, group: Range<usize>, ids: &mut Vec<u32>) {
        ids.clear();
        ids.extend(group.filter(|e| !self.of(*e).is_empty()).map(|e| e as u32));
    }

    /// Adds the weighted outputs of `group`, expert by expert, to their tokens' rows of `out`.
    pub fn add_outputs(
        &self,
        group: Range<usize>,
        hidden: usize,
        outputs: &[f32],
        out: &mut [f32],
    ) {
        let tokens = &self.tokens[self.starts[group.start]..self.starts[group.end]];
        for (token, output) in tokens.iter().zip(outputs.chunks(hidden)) {
            let out = &mut out[token.row * hidden..][..hidden];
            axpy(token.weight, output, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignments() -> ExpertAssignments {
        let choice = |expert| Choice {
            expert,
            weight: expert as f32,
        };
        let mut assignments = ExpertAssignments::default();
        let choices = [1, 4, 1, 2, 1, 4].map(choice);
        assignments.collect(&choices, 2, 6);
        assignments
    }

    #[test]
    fn tokens_are_sorted_by_expert_then_row() {
        let assignments = assignments();
        let rows = |e| assignments.of(e).iter().map(|t| t.row).collect::<Vec<_>>();
        assert_eq!(
            (rows(1), rows(2), rows(4)),
            (vec![0, 1, 2], vec![1], vec![0, 2])
        );
        assert!(
            [0, 3, 5, 6, 100]
                .into_iter()
                .all(|e| assignments.of(e).is_empty())
        );
        assert!(assignments.of(4).iter().all(|t| t.weight == 4.0));
    }

    #[test]
    fn groups_cover_all_used_experts_in_order() {
        let assignments = assignments();
        let groups = |slots| {
            let (mut groups, mut ids) = (Vec::new(), Vec::new());
            let mut group = assignments.group(0, slots);
            while !group.is_empty() {
                assignments.ids(group.clone(), &mut ids);
                groups.push(ids.clone());
                group = assignments.group(group.end, slots);
            }
            groups
        };
        assert_eq!(groups(1), [vec![1], vec![2], vec![4]]);
        assert_eq!(groups(3), [vec![1], vec![2, 4]]);
        assert_eq!(groups(6), [vec![1, 2, 4]]);
        assert_eq!(assignments.slots(2..6, 4..5), 1..3);
        assert_eq!(assignments.slots(2..6, 1..2), 0..0);
    }
}
