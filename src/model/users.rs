//! Which tokens of a slice use which expert.

use std::ops::Range;

use crate::model::router::Choice;
use crate::quant::axpy;

/// A token that chose an expert.
#[derive(Clone, Copy, Debug, Default)]
pub struct User {
    /// Index of the token in the slice.
    pub token: usize,
    /// Factor on the expert's output.
    pub weight: f32,
}

/// The tokens that chose each expert: expert by expert, tokens ascending. Their order is that of the slots.
#[derive(Debug, Default)]
pub struct Users {
    /// Where each expert's users start; one more at the end.
    starts: Vec<usize>,
    users: Vec<User>,
}

impl Users {
    /// Sorts the choices [tokens, top_k] by expert.
    pub fn collect(&mut self, choices: &[Choice], top_k: usize, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 2, 0);
        // Counted two places up, so that after the sums `starts[e + 1]` is the start of e: it moves to the end of
        // e, which is the start of e + 1, as the users are placed.
        for choice in choices {
            self.starts[choice.expert as usize + 2] += 1;
        }
        for e in 2..self.starts.len() {
            self.starts[e] += self.starts[e - 1];
        }
        self.users.clear();
        self.users.resize(choices.len(), User::default());
        for (i, choice) in choices.iter().enumerate() {
            let at = &mut self.starts[choice.expert as usize + 1];
            self.users[*at] = User {
                token: i / top_k,
                weight: choice.weight,
            };
            *at += 1;
        }
        self.starts.pop();
    }

    /// The users of an expert; none when there is no such expert.
    pub fn of(&self, expert: usize) -> &[User] {
        match self.starts.get(expert..expert + 2) {
            Some(&[start, end]) => &self.users[start..end],
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

    /// The longest range of experts from `first` on that has at most `slots` users, or one expert with more.
    /// Empty when no expert from `first` on has users.
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

    /// The experts of `group` that have users, ascending.
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
        let users = &self.users[self.starts[group.start]..self.starts[group.end]];
        for (user, output) in users.iter().zip(outputs.chunks(hidden)) {
            let out = &mut out[user.token * hidden..][..hidden];
            axpy(user.weight, output, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        let choice = |expert| Choice {
            expert,
            weight: expert as f32,
        };
        let mut users = Users::default();
        let choices = [1, 4, 1, 2, 1, 4].map(choice);
        users.collect(&choices, 2, 6);
        users
    }

    #[test]
    fn users_are_sorted_by_expert_then_token() {
        let users = users();
        let tokens = |e| users.of(e).iter().map(|u| u.token).collect::<Vec<_>>();
        assert_eq!(
            (tokens(1), tokens(2), tokens(4)),
            (vec![0, 1, 2], vec![1], vec![0, 2])
        );
        assert!(
            [0, 3, 5, 6, 100]
                .into_iter()
                .all(|e| users.of(e).is_empty())
        );
        assert!(users.of(4).iter().all(|u| u.weight == 4.0));
    }

    #[test]
    fn groups_cover_all_used_experts_in_order() {
        let users = users();
        let groups = |slots| {
            let (mut groups, mut ids) = (Vec::new(), Vec::new());
            let mut group = users.group(0, slots);
            while !group.is_empty() {
                users.ids(group.clone(), &mut ids);
                groups.push(ids.clone());
                group = users.group(group.end, slots);
            }
            groups
        };
        assert_eq!(groups(1), [vec![1], vec![2], vec![4]]);
        assert_eq!(groups(3), [vec![1], vec![2, 4]]);
        assert_eq!(groups(6), [vec![1, 2, 4]]);
        assert_eq!(users.slots(2..6, 4..5), 1..3);
        assert_eq!(users.slots(2..6, 1..2), 0..0);
    }
}
