//! Assigns experts to slabs and picks the one to evict. No I/O.

use colibri_ring::SlabId;

use super::eviction::{Eviction, ProtectedLfu};
use super::key::ExpertKey;

#[derive(Clone, Copy, Debug)]
struct Slot {
    class: u8,
    held: Option<Held>,
}

/// The expert in a slab.
#[derive(Clone, Copy, Debug)]
struct Held {
    key: ExpertKey,
    /// Tick of the last use; 0 for a prediction that its router did not confirm.
    last_use: u64,
    /// Being read, or being computed from: not to be evicted.
    busy: bool,
}

/// Experts in slabs. Each layer has an equal quota of the slabs. The layer that is the furthest over its quota evicts an expert: a
/// mispredicted one, else the one of the least worth to the [`Eviction`]. A plain LRU over all layers would be useless: layers run
/// in turn, so it evicts what the next token needs first.
///
/// Pinned experts are never evicted and count in no quota.
#[derive(Debug)]
pub struct Cache<E = ProtectedLfu> {
    slots: Vec<Slot>,
    free: Vec<SlabId>,
    /// Slab of each expert, by `layer * experts + expert`.
    slab_of: Vec<Option<SlabId>>,
    experts: usize,
    /// Slabs of each layer that may be evicted.
    by_layer: Vec<Vec<SlabId>>,
    /// How many slabs each layer holds, those of pinned experts included.
    held: Vec<usize>,
    /// By `layer * experts + expert`.
    pinned: Vec<bool>,
    per_layer_quota: usize,
    tick: u64,
    eviction: E,
}

impl Cache {
    /// An empty cache of `counts[c]` slabs of class c, numbered class after class, for `layers` layers of
    /// `experts` experts.
    pub fn new(counts: &[usize], layers: usize, experts: usize, per_layer_quota: usize) -> Cache {
        let eviction = ProtectedLfu::new(layers, experts, ProtectedLfu::HALF_LIFE);
        Cache::with_eviction(counts, layers, experts, per_layer_quota, eviction)
    }
}

impl<E: Eviction> Cache<E> {
    /// As [`Cache::new`], with another policy.
    pub fn with_eviction(
        counts: &[usize],
        layers: usize,
        experts: usize,
        per_layer_quota: usize,
        eviction: E,
    ) -> Cache<E> {
        let slot = |class: usize| Slot {
            class: class as u8,
            held: None,
        };
        let slots: Vec<Slot> = (counts.iter().enumerate())
            .flat_map(|(class, &n)| std::iter::repeat_n(slot(class), n))
            .collect();
        Cache {
            free: (0..slots.len() as u32).rev().map(SlabId).collect(),
            slots,
            slab_of: vec![None; layers * experts],
            experts,
            by_layer: vec![Vec::new(); layers],
            held: vec![0; layers],
            pinned: vec![false; layers * experts],
            per_layer_quota,
            tick: 0,
            eviction,
        }
    }

    fn index(&self, key: ExpertKey) -> usize {
        key.layer * self.experts + key.expert as usize
    }

    /// The slab that holds an expert, or into which it is being read.
    pub fn slab(&self, key: ExpertKey) -> Option<SlabId> {
        self.slab_of[self.index(key)]
    }

    /// How many experts of a layer have slabs.
    pub fn holds(&self, layer: usize) -> usize {
        self.held[layer]
    }

    /// Pins experts, in memory or not, and leaves each layer a quota of the other slabs. Enough slabs must remain for
    /// the experts that are demanded at once.
    pub fn pin(&mut self, keys: &[ExpertKey], per_layer_quota: usize) {
        for key in keys {
            let index = self.index(*key);
            self.pinned[index] = true;
            if let Some(slab) = self.slab_of[index] {
                self.by_layer[key.layer].retain(|s| *s != slab);
            }
        }
        self.per_layer_quota = per_layer_quota;
    }

    /// The expert in a slab.
    pub fn key(&self, slab: SlabId) -> Option<ExpertKey> {
        self.slots[slab.index()].held.map(|held| held.key)
    }

    fn held(&mut self, slab: SlabId) -> &mut Held {
        self.slots[slab.index()]
            .held
            .as_mut()
            .expect("the slab holds an expert")
    }

    /// A pass of `tokens` tokens begins in a layer. `chosen` lists each expert once for every token that uses it.
    pub fn begin_pass(&mut self, layer: usize, chosen: &[u32], tokens: usize) {
        self.tick += 1;
        self.eviction.begin_pass(layer, chosen, tokens, self.tick);
    }

    /// Marks an expert as used now.
    pub fn touch(&mut self, slab: SlabId) {
        self.tick += 1;
        self.held(slab).last_use = self.tick;
    }

    /// Marks a mispredicted expert: it is the first to be evicted.
    pub fn forget_use(&mut self, slab: SlabId) {
        self.held(slab).last_use = 0;
    }

    /// Protects a slab from eviction, or ends that.
    pub fn set_busy(&mut self, slab: SlabId, busy: bool) {
        self.held(slab).busy = busy;
    }

    /// A slab of a class for an expert of `layer`, and whether an expert was evicted from it. `None` when all slabs of the class are
    /// busy or pinned, or for a `prefetch`, when it would evict what its layer may need.
    pub fn make_room(&mut self, class: u8, layer: usize, prefetch: bool) -> Option<(SlabId, bool)> {
        if let Some(at) = self
            .free
            .iter()
            .rposition(|s| self.slots[s.index()].class == class)
        {
            return Some((self.free.remove(at), false));
        }
        let slab = match prefetch {
            true => self.spare(class, layer)?,
            false => self.victim(class, layer)?,
        };
        self.remove(slab);
        self.free.pop();
        Some((slab, true))
    }

    fn victim(&self, class: u8, layer: usize) -> Option<SlabId> {
        if !self.eviction.is_pooled() {
            if let Some(slab) = self.over_quota(class, |_| true) {
                return Some(slab);
            }
            if let Some(slab) = self.cheapest(class, &self.by_layer[layer]) {
                return Some(slab);
            }
        }
        self.cheapest(class, self.by_layer.iter().flatten())
    }

    /// The cheapest slab of the layer that is the furthest over its quota, among the layers that `may` evict.
    fn over_quota(&self, class: u8, may: impl Fn(usize) -> bool) -> Option<SlabId> {
        let over = (0..self.by_layer.len())
            .filter(|&l| may(l) && self.by_layer[l].len() > self.per_layer_quota)
            .filter_map(|l| Some((l, self.cheapest(class, &self.by_layer[l])?)));
        let furthest = over.max_by_key(|(l, _)| self.by_layer[*l].len());
        furthest.map(|(_, slab)| slab)
    }

    /// A slab that a prefetch for `layer` may take: one that another layer has over its quota, or that of a wrong prefetch of this
    /// layer. Other experts of the layer are more likely to be used than what is prefetched.
    fn spare(&self, class: u8, layer: usize) -> Option<SlabId> {
        if let Some(slab) = self.over_quota(class, |l| l != layer) {
            return Some(slab);
        }
        let own = self.cheapest(class, &self.by_layer[layer])?;
        self.slots[own.index()]
            .held
            .filter(|held| held.last_use == 0)
            .map(|_| own)
    }

    /// The slab of a class that is not busy and is worth least.
    fn cheapest<'a>(
        &self,
        class: u8,
        slabs: impl IntoIterator<Item = &'a SlabId>,
    ) -> Option<SlabId> {
        let candidates = slabs.into_iter().filter_map(|slab| {
            let slot = &self.slots[slab.index()];
            let held = slot.held.filter(|held| !held.busy && slot.class == class)?;
            // Nothing is worth less than a misprediction.
            let worth = (held.last_use > 0).then(|| self.eviction.worth(held.key, held.last_use));
            Some((worth, *slab))
        });
        candidates.min().map(|(_, slab)| slab)
    }

    /// Puts an expert into a slab from [`Cache::make_room`]. It is busy.
    pub fn insert(&mut self, key: ExpertKey, slab: SlabId) {
        self.tick += 1;
        self.slots[slab.index()].held = Some(Held {
            key,
            last_use: self.tick,
            busy: true,
        });
        let index = self.index(key);
        self.slab_of[index] = Some(slab);
        self.held[key.layer] += 1;
        if !self.pinned[index] {
            self.by_layer[key.layer].push(slab);
        }
    }

    /// Frees a slab.
    pub fn remove(&mut self, slab: SlabId) {
        let held = self.slots[slab.index()]
            .held
            .take()
            .expect("the slab holds an expert");
        let index = self.index(held.key);
        self.slab_of[index] = None;
        self.by_layer[held.key.layer].retain(|s| *s != slab);
        self.held[held.key.layer] -= 1;
        self.free.push(slab);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(layer: usize, expert: u32) -> ExpertKey {
        ExpertKey { layer, expert }
    }

    /// Reads an expert and computes it.
    fn load(cache: &mut Cache, k: ExpertKey) -> SlabId {
        let (slab, _) = cache.make_room(0, k.layer, false).expect("a slab");
        cache.insert(k, slab);
        cache.set_busy(slab, false);
        slab
    }

    #[test]
    fn the_layer_over_its_quota_evicts_its_least_recently_used() {
        let mut cache = Cache::new(&[4], 2, 8, 1);
        for expert in 0..3 {
            load(&mut cache, key(0, expert));
        }
        load(&mut cache, key(1, 7));
        cache.touch(cache.slab(key(0, 0)).unwrap());
        load(&mut cache, key(1, 6));
        assert_eq!(cache.slab(key(0, 1)), None);
        load(&mut cache, key(1, 5));
        assert_eq!(
            cache.slab(key(1, 7)),
            None,
            "both layers hold two, and this is the later layer's oldest"
        );
        assert!(cache.slab(key(0, 0)).is_some() && cache.slab(key(0, 2)).is_some());
    }

    #[test]
    fn busy_slabs_are_never_evicted() {
        let mut cache = Cache::new(&[2], 2, 8, 0);
        let a = load(&mut cache, key(0, 0));
        let b = load(&mut cache, key(0, 1));
        cache.set_busy(a, true);
        assert_eq!(cache.make_room(0, 1, false), Some((b, true)));
        assert_eq!(cache.make_room(0, 1, false), None);
        assert_eq!(cache.slab(key(0, 0)), Some(a));
    }

    #[test]
    fn a_misprediction_is_evicted_first() {
        let mut cache = Cache::new(&[3], 1, 8, 3);
        for expert in 0..3 {
            load(&mut cache, key(0, expert));
        }
        cache.forget_use(cache.slab(key(0, 2)).unwrap());
        load(&mut cache, key(0, 3));
        assert_eq!(cache.slab(key(0, 2)), None);
    }

    #[test]
    fn a_prefetch_evicts_nothing_that_its_layer_may_need() {
        let mut cache = Cache::new(&[4], 2, 8, 1);
        for expert in 0..3 {
            load(&mut cache, key(1, expert));
        }
        let other = load(&mut cache, key(0, 7));
        assert_eq!(cache.make_room(0, 1, true), None, "layer 0 has its quota");
        let wrong = cache.slab(key(1, 1)).unwrap();
        cache.forget_use(wrong);
        assert_eq!(cache.make_room(0, 1, true), Some((wrong, true)));
        cache.insert(key(0, 6), wrong);
        cache.set_busy(wrong, false);
        assert_eq!(cache.make_room(0, 1, true), Some((other, true)));
    }

    #[test]
    fn the_least_frequently_used_is_evicted_unless_the_last_pass_used_it() {
        let mut cache = Cache::new(&[4], 1, 8, 4);
        let pass = |cache: &mut Cache, expert: u32| {
            cache.begin_pass(0, &[expert], 1);
            match cache.slab(key(0, expert)) {
                Some(slab) => cache.touch(slab),
                None => drop(load(cache, key(0, expert))),
            }
        };
        for expert in [1, 1, 1, 2, 2, 3, 3, 0] {
            pass(&mut cache, expert);
        }
        pass(&mut cache, 4);
        assert_eq!(cache.slab(key(0, 0)), None, "used once");
        pass(&mut cache, 5);
        assert_eq!(
            cache.slab(key(0, 4)),
            None,
            "used once, and not in this pass"
        );
        assert!((1..4).all(|expert| cache.slab(key(0, expert)).is_some()));
        // Experts in long use are protected in time.
        for _ in 0..600 {
            pass(&mut cache, 6);
            pass(&mut cache, 7);
        }
        pass(&mut cache, 5);
        pass(&mut cache, 4);
        assert!([6, 7].iter().all(|e| cache.slab(key(0, *e)).is_some()));
        assert_eq!(cache.slab(key(0, 2)), None);
    }

    #[test]
    fn pinned_experts_stay() {
        let mut cache = Cache::new(&[4], 2, 8, 2);
        let early = load(&mut cache, key(0, 5));
        cache.pin(&[key(0, 5), key(0, 6)], 1);
        load(&mut cache, key(0, 6));
        for expert in 0..4 {
            load(&mut cache, key(1, expert));
        }
        assert_eq!(cache.slab(key(0, 5)), Some(early));
        assert!(cache.slab(key(0, 6)).is_some() && cache.slab(key(1, 3)).is_some());
        assert_eq!((cache.holds(0), cache.holds(1)), (2, 2));
        // A failed read frees the slab, and may be repeated.
        cache.remove(early);
        assert_eq!(cache.holds(0), 1);
        load(&mut cache, key(0, 5));
        load(&mut cache, key(0, 7));
        assert_eq!(cache.slab(key(1, 2)), None, "the oldest that is not pinned");
    }

    #[test]
    fn classes_do_not_mix() {
        let mut cache = Cache::new(&[1, 1], 1, 8, 0);
        let small = load(&mut cache, key(0, 0));
        assert_eq!(small, SlabId(0));
        assert_eq!(cache.make_room(1, 0, false), Some((SlabId(1), false)));
        assert_eq!(cache.make_room(1, 0, false), None);
        assert_eq!(cache.make_room(0, 0, false), Some((SlabId(0), true)));
    }
}
