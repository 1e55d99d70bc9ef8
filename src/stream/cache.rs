//! Which expert is in which slab, and which one makes room for another. Pure bookkeeping, no I/O.

use colibri_ring::arena::SlabId;

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
    /// Tick of the last demand; 0 for a guess that was not asked for when its layer came.
    used: u64,
    /// Being read, or being computed from: not to be taken away.
    busy: bool,
}

/// Experts in slabs. Every layer has an equal share of the slabs of a class; a layer that holds more than its
/// share (the layer computed last, usually) gives up its least recently used expert first. A plain LRU over all layers
/// would be useless: layers are visited in turn, so what it drops is always what the next token needs first.
#[derive(Debug)]
pub struct Cache {
    slots: Vec<Slot>,
    free: Vec<SlabId>,
    /// Slab of each expert, by `layer * experts + expert`.
    slab_of: Vec<Option<SlabId>>,
    experts: usize,
    /// Slabs that each layer holds.
    by_layer: Vec<Vec<SlabId>>,
    share: usize,
    clock: u64,
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
            share,
            clock: 0,
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
        self.by_layer[layer].len()
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

    /// Marks an expert as demanded now.
    pub fn touch(&mut self, slab: SlabId) {
        self.clock += 1;
        self.held(slab).used = self.clock;
    }

    /// Marks a guess that did not come true: it is the first to make room.
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
            .filter_map(|l| Some((l, self.oldest(class, &self.by_layer[l])?)))
            .max_by_key(|(l, _)| self.by_layer[*l].len());
        if let Some((_, slab)) = over_share {
            return Some(slab);
        }
        let own = self.oldest(class, &self.by_layer[layer]);
        own.or_else(|| self.oldest(class, self.by_layer.iter().flatten()))
    }

    /// The least recently used slab of a class that may be taken.
    fn oldest<'a>(&self, class: u8, slabs: impl IntoIterator<Item = &'a SlabId>) -> Option<SlabId> {
        let used = |slab: SlabId| {
            let slot = &self.slots[slab.index()];
            let held = slot.held.filter(|held| !held.busy && slot.class == class)?;
            Some((held.used, slab))
        };
        slabs
            .into_iter()
            .filter_map(|slab| used(*slab))
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
        self.by_layer[key.layer].push(slab);
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
    fn classes_do_not_mix() {
        let mut cache = Cache::new(&[1, 1], 1, 8, 0);
        let small = load(&mut cache, key(0, 0));
        assert_eq!(small, SlabId(0));
        assert_eq!(cache.make_room(1, 0), Some((SlabId(1), false)));
        assert_eq!(cache.make_room(1, 0), None);
        assert_eq!(cache.make_room(0, 0), Some((SlabId(0), true)));
    }
}
