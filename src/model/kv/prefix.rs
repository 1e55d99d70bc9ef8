//! Finds pages by the tokens they belong to, so that equal beginnings are stored once.
//!
//! A radix tree whose edges are pages: a node is the page that follows its parent's, found by the ids of its tokens. Inner nodes are
//! whole pages; a leaf may be the partly filled last page of a text. What a page holds depends on the ids on the way to it alone, so any
//! sequence with these ids can go on from it.
//!
//! The tree is one more holder of its pages. A page that only the tree holds is evicted when the pool is exhausted, the least recently
//! used leaf first. Sequences hold whole paths, so a page that one of them holds never loses the way to it.

use std::sync::Arc;

use super::layout::PAGE;
use super::page::Page;

/// A page of the prediction layer, and how many of its first slots are filled.
pub type DraftPage = (Arc<Page>, usize);

#[derive(Debug)]
struct Node {
    /// The tokens of the page, 1 to [`PAGE`].
    ids: Box<[u32]>,
    page: Arc<Page>,
    /// The rows of the prediction layer, where they are known.
    draft: Option<DraftPage>,
    children: Vec<usize>,
    parent: Option<usize>,
    /// Value of [`PrefixTree::clock`] at the last use.
    used: u64,
}

/// What [`PrefixTree::find`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The pages, first to last.
    pub pages: Vec<Arc<Page>>,
    /// Tokens whose rows they have.
    pub tokens: usize,
    /// Pages of the prediction layer, from the first one on without a gap.
    pub drafts: Vec<Arc<Page>>,
    /// Slots of the prediction layer that they have.
    pub draft_slots: usize,
}

/// Pages by the ids of their tokens and of all tokens before them.
#[derive(Debug, Default)]
pub struct PrefixTree {
    nodes: Vec<Option<Node>>,
    /// Indices in `nodes` that are free.
    vacant: Vec<usize>,
    roots: Vec<usize>,
    clock: u64,
}

impl PrefixTree {
    fn node(&self, index: usize) -> &Node {
        self.nodes[index].as_ref().expect("a linked node exists")
    }

    fn node_mut(&mut self, index: usize) -> &mut Node {
        self.nodes[index].as_mut().expect("a linked node exists")
    }

    fn children(&self, parent: Option<usize>) -> &Vec<usize> {
        parent.map_or(&self.roots, |parent| &self.node(parent).children)
    }

    fn children_mut(&mut self, parent: Option<usize>) -> &mut Vec<usize> {
        match parent {
            Some(parent) => &mut self.node_mut(parent).children,
            None => &mut self.roots,
        }
    }

    /// The child of `parent` whose page begins with the most of `ids`, and how many.
    fn closest(&self, parent: Option<usize>, ids: &[u32]) -> Option<(usize, usize)> {
        let common = |child: &usize| {
            let same = self.node(*child).ids.iter().zip(ids);
            same.take_while(|(a, b)| a == b).count()
        };
        let children = self.children(parent).iter();
        let closest = children.map(|child| (*child, common(child)));
        closest.max_by_key(|(_, n)| *n).filter(|(_, n)| *n > 0)
    }

    /// The longest beginning of `ids` that is known. Counts as a use.
    pub fn find(&mut self, ids: &[u32]) -> Found {
        self.clock += 1;
        let (mut found, mut parent) = (Found::default(), None);
        while let Some((child, common)) = self.closest(parent, &ids[found.tokens..]) {
            let used = self.clock;
            let node = self.node_mut(child);
            node.used = used;
            found.pages.push(Arc::clone(&node.page));
            if let Some((page, filled)) = &node.draft
                && found.draft_slots == found.tokens
            {
                found.drafts.push(Arc::clone(page));
                found.draft_slots += common.min(*filled);
            }
            found.tokens += common;
            parent = Some(child);
            if common < PAGE {
                break;
            }
        }
        found
    }

    /// The node below `parent` that begins with `ids`.
    fn covering(&self, parent: Option<usize>, ids: &[u32]) -> Option<usize> {
        let mut children = self.children(parent).iter().copied();
        children.find(|child| self.node(*child).ids.starts_with(ids))
    }

    /// Makes `page` findable as the one that follows `parent` and has the tokens `ids`. Returns its node, and the page to use from
    /// now on: an equal one that was there before takes its place.
    pub fn insert(
        &mut self,
        parent: Option<usize>,
        ids: &[u32],
        page: &Arc<Page>,
    ) -> (usize, Arc<Page>) {
        self.clock += 1;
        if let Some(index) = self.covering(parent, ids) {
            let used = self.clock;
            let node = self.node_mut(index);
            node.used = used;
            return (index, Arc::clone(&node.page));
        }
        let node = Node {
            ids: ids.into(),
            page: Arc::clone(page),
            draft: None,
            children: Vec::new(),
            parent,
            used: self.clock,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.nodes[index] = Some(node);
                index
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        // Partly filled pages that this one begins with are of no more use.
        let outdated: Vec<usize> = (self.children(parent).iter().copied())
            .filter(|child| ids.starts_with(&self.node(*child).ids))
            .collect();
        outdated.into_iter().for_each(|child| self.remove(child));
        self.children_mut(parent).push(index);
        (index, Arc::clone(page))
    }

    /// Adds the page of the prediction layer to a node, with `filled` slots. Returns the page to use from now on, if that is another one.
    pub fn insert_draft(
        &mut self,
        index: usize,
        page: &Arc<Page>,
        filled: usize,
    ) -> Option<Arc<Page>> {
        let node = self.node_mut(index);
        match &node.draft {
            Some((known, slots)) if *slots >= filled => {
                (!Arc::ptr_eq(known, page)).then(|| Arc::clone(known))
            }
            _ => {
                node.draft = Some((Arc::clone(page), filled));
                None
            }
        }
    }

    /// Removes a node and all below it.
    fn remove(&mut self, index: usize) {
        let Some(node) = self.nodes[index].take() else {
            return;
        };
        self.vacant.push(index);
        if node
            .parent
            .is_none_or(|parent| self.nodes[parent].is_some())
        {
            self.children_mut(node.parent)
                .retain(|child| *child != index);
        }
        node.children
            .into_iter()
            .for_each(|child| self.remove(child));
    }

    /// The ids on the way to each leaf. The last one is the most recently used.
    pub fn texts(&self) -> Vec<Vec<u32>> {
        let mut texts = Vec::new();
        let mut open: Vec<(usize, Vec<u32>)> =
            self.roots.iter().map(|root| (*root, Vec::new())).collect();
        while let Some((index, before)) = open.pop() {
            let node = self.node(index);
            let ids = [&before[..], &node.ids].concat();
            match node.children.is_empty() {
                true => texts.push((node.used, ids)),
                false => open.extend(node.children.iter().map(|child| (*child, ids.clone()))),
            }
        }
        texts.sort_by_key(|(used, _)| *used);
        texts.into_iter().map(|(_, ids)| ids).collect()
    }

    /// Pages that only the tree holds: as many can be evicted.
    pub fn evictable(&self) -> usize {
        let nodes = self.nodes.iter().flatten();
        nodes
            .filter(|node| Arc::strong_count(&node.page) == 1)
            .count()
    }

    /// Frees the least recently used page that only the tree holds and nothing follows. Returns false when there is none.
    pub fn evict(&mut self) -> bool {
        let unused = |node: &Node| node.children.is_empty() && Arc::strong_count(&node.page) == 1;
        self.evict_oldest(unused)
    }

    /// Frees the least recently used page of the prediction layer that only the tree holds.
    pub fn evict_draft(&mut self) -> bool {
        let unused = |node: &&mut Node| {
            (node.draft.as_ref()).is_some_and(|(page, _)| Arc::strong_count(page) == 1)
        };
        let nodes = self.nodes.iter_mut().flatten().filter(unused);
        let oldest = nodes.min_by_key(|node| node.used);
        oldest.map(|node| node.draft = None).is_some()
    }

    /// Lets go of `page` and of all that follows it, so that a sequence that holds it may be its only holder.
    pub fn forget(&mut self, page: &Arc<Page>) {
        let holds = |node: &Node| {
            let draft = node.draft.as_ref().map(|(page, _)| page);
            Arc::ptr_eq(&node.page, page) || draft.is_some_and(|draft| Arc::ptr_eq(draft, page))
        };
        let index = (0..self.nodes.len()).find(|i| self.nodes[*i].as_ref().is_some_and(holds));
        if let Some(index) = index {
            self.remove(index);
        }
    }

    fn evict_oldest(&mut self, unused: impl Fn(&Node) -> bool) -> bool {
        let nodes = self.nodes.iter().enumerate();
        let candidates = nodes.filter_map(|(i, node)| Some((i, node.as_ref()?)));
        let oldest = candidates
            .filter(|(_, node)| unused(node))
            .min_by_key(|(_, node)| node.used);
        let oldest = oldest.map(|(index, _)| index);
        oldest.map(|index| self.remove(index)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{KvShape, LayerWidths, PageLayout};
    use super::super::page::PagePool;
    use super::*;

    fn pool(capacity: usize) -> PagePool {
        let layer = LayerWidths {
            kv: 1,
            index_key: None,
            ahead: 0,
        };
        PagePool::new(PageLayout::new(KvShape(vec![layer]), 1), capacity)
    }

    /// Publishes the whole pages of `ids` and the last one, returning them.
    fn publish(tree: &mut PrefixTree, pool: &PagePool, ids: &[u32]) -> Vec<Arc<Page>> {
        let (mut parent, mut pages) = (None, Vec::new());
        for ids in ids.chunks(PAGE) {
            let (node, page) = tree.insert(parent, ids, &pool.allocate().unwrap());
            (parent, pages) = (Some(node), [pages, vec![page]].concat());
        }
        pages
    }

    #[test]
    fn the_longest_common_beginning_is_found() {
        let (pool, mut tree) = (pool(100), PrefixTree::default());
        let text: Vec<u32> = (0..200).collect();
        let pages = publish(&mut tree, &pool, &text);
        let mut other = text.clone();
        other[150] = 7;
        let others = publish(&mut tree, &pool, &other);
        assert!(Arc::ptr_eq(&pages[1], &others[1]) && !Arc::ptr_eq(&pages[2], &others[2]));
        for (ids, tokens) in [
            (&text[..], 200),
            (&other[..], 200),
            (&text[..100], 100),
            (&[text.clone(), vec![1, 2]].concat(), 200),
            (&text[1..], 0),
            (&[], 0),
        ] {
            let found = tree.find(ids);
            assert_eq!(found.tokens, tokens);
            assert_eq!(found.pages.len(), tokens.div_ceil(PAGE));
        }
        assert_eq!(tree.texts(), [other, text.clone()]);
        // The partly filled page is replaced by the one that it became.
        publish(&mut tree, &pool, &[text.clone(), vec![1; 56]].concat());
        assert_eq!(tree.find(&text).tokens, 200);
        assert_eq!(tree.nodes.iter().flatten().count(), 6);
    }

    #[test]
    fn the_least_recently_used_leaves_go_first_and_held_ones_stay() {
        let (pool, mut tree) = (pool(6), PrefixTree::default());
        let texts: Vec<Vec<u32>> = (0..3).map(|i| vec![i; 128]).collect();
        let mut held: Vec<_> = texts
            .iter()
            .map(|ids| publish(&mut tree, &pool, ids))
            .collect();
        assert!(!tree.evict() && tree.evictable() == 0 && pool.free() == 0);
        held.remove(1);
        tree.find(&texts[0]);
        drop(held.remove(0));
        assert_eq!(tree.evictable(), 4);
        assert!(tree.evict() && tree.evict());
        assert_eq!(tree.find(&texts[1]).tokens, 0);
        assert_eq!(tree.find(&texts[0]).tokens, 128);
        assert!(tree.evict() && tree.evict() && !tree.evict());
        assert_eq!((pool.free(), tree.find(&texts[2]).tokens), (4, 128));
        tree.forget(&held[0][0]);
        assert_eq!(tree.find(&texts[2]).tokens, 0);
        drop(held);
        assert_eq!(pool.free(), 6);
    }

    #[test]
    fn pages_of_the_prediction_layer_come_later_and_without_gaps() {
        let (pool, mut tree) = (pool(20), PrefixTree::default());
        let text: Vec<u32> = (0..192).collect();
        publish(&mut tree, &pool, &text);
        let nodes: Vec<usize> = (0..tree.nodes.len()).collect();
        let draft = pool.allocate().unwrap();
        assert!(tree.insert_draft(nodes[1], &draft, PAGE).is_none());
        assert_eq!(tree.find(&text).draft_slots, 0, "the first page has none");
        assert!(
            tree.insert_draft(nodes[0], &pool.allocate().unwrap(), PAGE)
                .is_none()
        );
        let found = tree.find(&text);
        assert_eq!(
            (found.tokens, found.draft_slots, found.drafts.len()),
            (192, 128, 2)
        );
        let other = pool.allocate().unwrap();
        let known = tree.insert_draft(nodes[1], &other, PAGE).unwrap();
        assert!(Arc::ptr_eq(&known, &draft));
        drop((found, known, draft));
        assert!(tree.evict_draft() && tree.evict_draft() && !tree.evict_draft());
    }
}
