//! Which expert is in which slab, and which one makes room for another. Pure bookkeeping, no I/O.

use colibri_ring::SlabId;

use super::usage::age;

/// Tokens after which a use counts half in the choice of what makes room.
const HALF_LIFE: f64 = 128.0;

/// Names a routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Expert id.
    pub expert: u32,
}

/// What a slab holds.
#[derive(Clone, Copy, Debug)]
struct Slot {
    class: u8,
    held: Option<Held>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    key: Key,
    /// Tick of the last demand; 0 for a prediction that was not asked for when its layer came.
    used: u64,
    /// Being read, or being computed from: not to be taken away.
    busy: bool,
}

/// Experts in slabs. Every layer has an equal share of the slabs of a class; a layer that holds more than its
/// share (the layer computed last, usually) gives up an expert first: a wrong prediction, else the one that was used least often of
/// late, ties to the least recently used. What the layer's last pass used is spared as long as there is something else,
/// because a token repeats much of what the one before it used. A plain LRU over all layers would be useless: layers are visited
/// in turn, so what it drops is always what the next token needs first.
///
/// Pinned experts make room for nobody and count in no share.
#[derive(Debug)]
pub struct Cache {
    slots: Vec<Slot>,
    free: Vec<SlabId>,
    /// Slab of each expert, by `layer * experts + expert`.
    slab_of: Vec<Option<SlabId>>,
    experts: usize,
    /// Slabs of each layer that may make room.
    by_layer: Vec<Vec<SlabId>>,
    /// How many slabs each layer holds, those of pinned experts included.
    held: Vec<usize>,
    /// By `layer * experts + expert`.
    pinned: Vec<bool>,
    share: usize,
    clock: u64,
    /// Of each layer, the tick at which its last pass began.
    pass: Vec<u64>,
    /// Aged uses, by `layer * experts + expert`.
    uses: Vec<f32>,
}

impl Cache {
    /// An empty cache of `counts[c]` slabs of class c, numbered class after class, for `layers` layers of
    /// `experts` experts, of which each may keep `share`.
    pub fn new(counts: &[usize], layers: usize, experts: usize, share: usize) -> Cache {
        let slots: Vec<Slot> = (counts.iter().enumerate())
            .flat_map(|(c, &n)| {
                std::iter::repeat_n(
                    Slot {
                        class: c as u8,
                        held: None,
                    },
                    n,
                )
            })
            .collect();
        Cache {
            free: (0..slots.len() as u32).rev().map(SlabId).collect(),
            slots,
            slab_of: vec![None; layers * experts],
            experts,
            by_layer: vec![Vec::new(); layers],
            held: vec![0; layers],
            pinned: vec![false; layers * experts],
            share,
            clock: 0,
            pass: vec![0; layers],
            uses: vec![0.0; layers * experts],
        }
    }

    fn index(&self, key: Key) -> usize {
        key.layer * self.experts + key.expert as usize
    }

    /// The slab that holds an expert, or into which it is being read.
    pub fn slab(&self, key: Key) -> Option<SlabId> {
        self.slab_of[self.index(key)]
    }

    /// How many experts of a layer have slabs.
    pub fn holds(&self, layer: usize) -> usize {
        self.held[layer]
    }

    /// Once they are read, these experts stay; each layer may keep `share` beside them. There must be slabs that are not
    /// pinned for whatever is demanded at once.
    pub fn pin(&mut self, keys: &[Key], share: usize) {
        for key in keys {
            let index = self.index(*key);
            self.pinned[index] = true;
            if let Some(slab) = self.slab_of[index] {
                self.by_layer[key.layer].retain(|s| *s != slab);
            }
        }
        self.share = share;
    }

    /// The expert in a slab.
    pub fn key(&self, slab: SlabId) -> Option<Key> {
        self.slots[slab.index()].held.map(|held| held.key)
    }

    fn held(&mut self, slab: SlabId) -> &mut Held {
        self.slots[slab.index()]
            .held
            .as_mut()
            .expect("the slab holds an expert")
    }

    /// A pass of `tokens` tokens begins in a layer, which use `chosen` experts, each as often as it is in the list.
    pub fn begin_pass(&mut self, layer: usize, chosen: &[u32], tokens: usize) {
        self.clock += 1;
        self.pass[layer] = self.clock;
        let uses = &mut self.uses[layer * self.experts..][..self.experts];
        age(uses, tokens as u64, HALF_LIFE);
        for id in chosen {
            uses[*id as usize] += 1.0;
        }
    }

    /// Marks an expert as demanded now.
    pub fn touch(&mut self, slab: SlabId) {
        self.clock += 1;
        self.held(slab).used = self.clock;
    }

    /// Marks a prediction that did not come true: it is the first to make room.
    pub fn forget_use(&mut self, slab: SlabId) {
        self.held(slab).used = 0;
    }

    /// Protects a slab from being taken away, or ends that.
    pub fn set_busy(&mut self, slab: SlabId, busy: bool) {
        self.held(slab).busy = busy;
    }

    /// A slab of a class for an expert of `layer`: a free one, or one whose expert makes room. In the second case the
    /// former expert is forgotten, and `true` is returned beside the slab.
    pub fn make_room(&mut self, class: u8, layer: usize) -> Option<(SlabId, bool)> {
        if let Some(at) = self
            .free
            .iter()
            .rposition(|s| self.slots[s.index()].class == class)
        {
            return Some((self.free.remove(at), false));
        }
        let slab = self.victim(class, layer)?;
        self.remove(slab);
        self.free.pop();
        Some((slab, true))
    }

    fn victim(&self, class: u8, layer: usize) -> Option<SlabId> {
        let over_share = (0..self.by_layer.len())
            .filter(|&l| self.by_layer[l].len() > self.share)
            .filter_map(|l| Some((l, self.coldest(class, &self.by_layer[l])?)))
            .max_by_key(|(l, _)| self.by_layer[*l].len());
        if let Some((_, slab)) = over_share {
            return Some(slab);
        }
        let own = self.coldest(class, &self.by_layer[layer]);
        own.or_else(|| self.coldest(class, self.by_layer.iter().flatten()))
    }

    /// The slab of a class that may be taken and is worth least.
    fn coldest<'a>(
        &self,
        class: u8,
        slabs: impl IntoIterator<Item = &'a SlabId>,
    ) -> Option<SlabId> {
        let worth = |slab: SlabId| {
            let slot = &self.slots[slab.index()];
            let held = slot.held.filter(|held| !held.busy && slot.class == class)?;
            // Counts are not negative, so their bits are in their order.
            let uses = self.uses[self.index(held.key)].to_bits();
            let worth = match held.used {
                0 => (0, 0, 0),
                used if used >= self.pass[held.key.layer] => (2, 0, used),
                used => (1, uses, used),
            };
            Some((worth, slab))
        };
        slabs
            .into_iter()
            .filter_map(|slab| worth(*slab))
            .min()
            .map(|(_, slab)| slab)
    }

    /// Puts an expert into a slab from [`Cache::make_room`]. It is busy.
    pub fn insert(&mut self, key: Key, slab: SlabId) {
        self.clock += 1;
        self.slots[slab.index()].held = Some(Held {
            key,
            used: self.clock,
            busy: true,
        });
        let index = self.index(key);
        self.slab_of[index] = Some(slab);
        self.held[key.layer] += 1;
        if !self.pinned[index] {
            self.by_layer[key.layer].push(slab);
        }
    }

    /// Forgets what is in a slab, which is free then.
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

    fn key(layer: usize, expert: u32) -> Key {
        Key { layer, expert }
    }

    /// Reads an expert and computes it.
    fn load(cache: &mut Cache, k: Key) -> SlabId {
        let (slab, _) = cache.make_room(0, k.layer).expect("a slab");
        cache.insert(k, slab);
        cache.set_busy(slab, false);
        slab
    }

    #[test]
    fn the_least_recently_used_of_the_layer_over_its_share_goes_first() {
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
    fn busy_slabs_are_never_taken() {
        let mut cache = Cache::new(&[2], 2, 8, 0);
        let a = load(&mut cache, key(0, 0));
        let b = load(&mut cache, key(0, 1));
        cache.set_busy(a, true);
        assert_eq!(cache.make_room(0, 1), Some((b, true)));
        assert_eq!(cache.make_room(0, 1), None);
        assert_eq!(cache.slab(key(0, 0)), Some(a));
    }

    #[test]
    fn a_wrong_guess_goes_first() {
        let mut cache = Cache::new(&[3], 1, 8, 3);
        for expert in 0..3 {
            load(&mut cache, key(0, expert));
        }
        cache.forget_use(cache.slab(key(0, 2)).unwrap());
        load(&mut cache, key(0, 3));
        assert_eq!(cache.slab(key(0, 2)), None);
    }

    #[test]
    fn the_least_often_used_goes_first_but_for_those_of_the_last_pass() {
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
        // What is in fashion no longer makes room in time.
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
        // A read that failed leaves nothing behind, and may be tried again.
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
        assert_eq!(cache.make_room(1, 0), Some((SlabId(1), false)));
        assert_eq!(cache.make_room(1, 0), None);
        assert_eq!(cache.make_room(0, 0), Some((SlabId(0), true)));
    }
}
