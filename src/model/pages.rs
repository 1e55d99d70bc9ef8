//! Gives pages to sequences: shares equal beginnings, evicts what no sequence uses, swaps sequences to files.

use std::env;
use std::io;
use std::path::PathBuf;

use crate::model::batch::Step;
use crate::model::error::ModelError;
use crate::model::indexer::Indexer;
use crate::model::kv::{
    KvShape, KvWriter, LayerWidths, PAGE, PageLayout, PagePool, PageTable, PrefixTree, SwapFile,
    pages_for,
};
use crate::model::layer::Layer;
use crate::model::load::Weights;
use crate::model::runner::{Runner, check_context};
use crate::model::sequence::{DraftState, Sequence, reusable};

impl Weights {
    /// Pools of pages for `tokens` tokens: of the model's layers, and of its prediction layer if it has one.
    pub(super) fn page_pools(&self, tokens: usize) -> (PagePool, Option<PagePool>) {
        let blocks = self.config().kv_blocks();
        let widths = |layer: &Layer, ahead| LayerWidths {
            kv: self.config().kv_width(),
            index_key: layer.attention.indexer().map(Indexer::width),
            ahead,
        };
        let layout = |layers| PageLayout::new(KvShape(layers), blocks);
        let pool = |layers| PagePool::new(layout(layers), pages_for(tokens));
        let main = self.layers.iter().map(|layer| widths(layer, 0)).collect();
        let draft = self.mtp.as_ref().map(|mtp| vec![widths(&mtp.layer, 1)]);
        (pool(main), draft.map(pool))
    }
}

impl Runner {
    /// A new sequence, for which tokens are drafted where the model can.
    pub fn sequence(&mut self) -> Sequence {
        self.born += 1;
        Sequence {
            ids: Vec::new(),
            kv: PageTable::new(self.pages.layout()),
            draft: self.draft_state(),
            swapped: None,
            born: self.born,
            published: (0, 0),
        }
    }

    fn draft_state(&self) -> Option<DraftState> {
        let width = self.weights.config().hidden_size;
        let pages = self.draft_pages.as_ref()?;
        Some(DraftState::new(pages.layout(), width))
    }

    /// Pages that sequences can still be given: those that are free, and those that are kept only because a prompt may reuse them.
    pub fn free_pages(&self) -> usize {
        self.pages.free() + self.prefixes.evictable()
    }

    /// The texts whose rows are known. The last one is the most recently used.
    pub fn known_texts(&self) -> Vec<Vec<u32>> {
        self.prefixes.texts()
    }

    /// Pages of the model's layers, in use or not.
    pub fn pages(&self) -> usize {
        self.pages.capacity()
    }

    /// Makes room for the tokens of all steps.
    pub(super) fn reserve(&mut self, steps: &mut [Step<'_>]) -> Result<(), ModelError> {
        let range = |step: &Step| (step.sequence.len(), step.sequence.len() + step.ids.len());
        let missing = |step: &Step| {
            let (start, end) = range(step);
            step.sequence.kv.missing(start, end)
        };
        let needed: usize = steps.iter().map(missing).sum();
        let mut enough = needed <= self.pages.free() || {
            // Copies of shared pages may prove unnecessary.
            let copies = steps
                .iter()
                .filter(|step| step.sequence.kv.is_shared(step.sequence.len()));
            needed - copies.count() <= self.free_pages()
        };
        for step in &mut *steps {
            let (start, end) = range(step);
            enough = enough && self.reserve_one(&mut step.sequence.kv, start, end);
        }
        if enough {
            return Ok(());
        }
        for step in steps {
            let len = step.sequence.len();
            step.sequence.kv.truncate(len);
        }
        let free = self.free_pages();
        Err(ModelError::OutOfPages { needed, free })
    }

    fn reserve_one(&mut self, table: &mut PageTable, start: usize, end: usize) -> bool {
        let (pages, prefixes) = (&self.pages, &mut self.prefixes);
        let reserve = |table: &mut PageTable, prefixes: &mut PrefixTree| {
            table.reserve(start, end, || pages.allocate_or(|| prefixes.evict()))
        };
        if reserve(table, prefixes) {
            return true;
        }
        // If only the prefix tree shares the page to be written, it need not be copied.
        if let Some(page) = table.shared_page(start) {
            prefixes.forget(page);
        }
        reserve(table, prefixes)
    }

    /// Reduces or replaces the tokens of a sequence by the longest beginning of `ids` whose rows are known, its own or those of any
    /// sequence before it. Returns the length of it: the other ids, at least one, are for [`Runner::forward`], whose logits have the same bits
    /// as without reuse.
    ///
    /// # Errors
    /// A sequence of another runner, or one that is swapped out.
    pub fn match_prefix(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
    ) -> Result<usize, ModelError> {
        self.check_owned(sequence)?;
        let own = reusable(&sequence.ids, ids);
        let mut found = self.prefixes.find(ids);
        let mut tokens = found.tokens.min(ids.len().saturating_sub(1));
        let mut seen = 0;
        if sequence.draft.is_some() {
            // A page less is cheaper than a prediction layer that begins anew.
            if tokens > 0 && found.draft_slots > 0 && tokens <= found.draft_slots + PAGE {
                tokens = tokens.min(found.draft_slots);
                // The layer's last row assumes the token that the prompt goes on with.
                tokens -= 1;
                seen = tokens;
            }
        }
        if tokens <= own {
            sequence.truncate(own);
            return Ok(own);
        }
        sequence.truncate(0);
        sequence.ids.extend_from_slice(&ids[..tokens]);
        found.pages.truncate(pages_for(tokens));
        found
            .pages
            .into_iter()
            .for_each(|page| sequence.kv.push(page));
        if let Some(draft) = &mut sequence.draft
            && seen > 0
        {
            draft.begin_at(0);
            found.drafts.truncate(pages_for(seen + 1));
            found
                .drafts
                .into_iter()
                .for_each(|page| draft.kv.push(page));
            (draft.seen, draft.assumed) = (seen, Some(ids[seen]));
        }
        sequence.published = (tokens / PAGE, seen / PAGE);
        Ok(tokens)
    }

    /// Makes all computed rows of a sequence reusable, those of its last page too, which [`Runner::forward`] publishes only when it
    /// is full. For the end of a prompt that others begin with, and for the end of a sequence.
    ///
    /// # Errors
    /// A stop, or a sequence of another runner or one that is swapped out.
    pub fn publish(&mut self, sequence: &mut Sequence) -> Result<(), ModelError> {
        self.check_owned(sequence)?;
        self.settle_drafts(sequence)?;
        self.publish_pages(sequence, sequence.len());
        Ok(())
    }

    /// Makes the whole pages of a sequence reusable.
    pub(super) fn publish_whole(&mut self, sequence: &mut Sequence) {
        let whole = sequence.len() / PAGE;
        if whole > sequence.published.0 {
            self.publish_pages(sequence, whole * PAGE);
        }
    }

    /// Makes the whole pages of the prediction layer reusable.
    pub(super) fn publish_drafts(&mut self, sequence: &mut Sequence) {
        let whole = (sequence.draft.as_ref())
            .filter(|draft| draft.first == 0)
            .map_or(0, |draft| (draft.seen + 1).min(sequence.len()) / PAGE);
        if whole > sequence.published.1 && sequence.published.0 >= whole {
            self.publish_pages(sequence, sequence.published.0 * PAGE);
        }
    }

    /// Gives the prefix tree the pages of the first `tokens` tokens. A page that it has already replaces that of the sequence.
    fn publish_pages(&mut self, sequence: &mut Sequence, tokens: usize) {
        let mut parent = None;
        for (index, ids) in sequence.ids[..tokens].chunks(PAGE).enumerate() {
            let (node, known) = (self.prefixes).insert(parent, ids, &sequence.kv.pages()[index]);
            parent = Some(node);
            sequence.kv.replace(index, &known);
            let Some(draft) = &mut sequence.draft else {
                continue;
            };
            let last = index * PAGE + ids.len() - 1;
            if draft.first == 0
                && draft.seen >= last
                && let Some(page) = draft.kv.pages().get(index)
                && let Some(known) = self.prefixes.insert_draft(node, page, ids.len())
            {
                draft.kv.replace(index, &known);
            }
        }
        let drafts = (sequence.draft.as_ref())
            .filter(|draft| draft.first == 0)
            .map_or(0, |draft| (draft.seen + 1).min(tokens) / PAGE);
        sequence.published = (tokens / PAGE, drafts);
    }

    /// Writes the pages of a sequence to a file and frees them. Until [`Runner::swap_in`] the sequence can be truncated and dropped, but
    /// not continued.
    ///
    /// # Errors
    /// [`ModelError::Swap`] when the file cannot be written: the sequence keeps its pages.
    pub fn swap_out(&mut self, sequence: &mut Sequence) -> Result<(), ModelError> {
        self.check_owned(sequence)?;
        let (drafts, hidden) = match &sequence.draft {
            Some(draft) => (draft.kv.pages(), &draft.hidden[..]),
            None => (&[][..], &[][..]),
        };
        let dir = self.swap_dir();
        let pages = sequence.kv.pages().iter().map(|page| page.values());
        let drafts = drafts.iter().map(|page| page.values());
        let written = SwapFile::write(&dir, pages, drafts, hidden);
        sequence.swapped = Some(written.map_err(|source| ModelError::Swap { dir, source })?);
        sequence.kv.truncate(0);
        sequence.published = (0, 0);
        if let Some(draft) = &mut sequence.draft {
            draft.kv.truncate(0);
            draft.hidden = Vec::new();
        }
        Ok(())
    }

    fn swap_dir(&self) -> PathBuf {
        self.options.swap_dir.clone().unwrap_or_else(env::temp_dir)
    }

    /// Reads the pages of a sequence back. Beginnings that are in memory are shared again.
    ///
    /// # Errors
    /// [`ModelError::OutOfPages`] and [`ModelError::Swap`]: the sequence stays in its file.
    pub fn swap_in(&mut self, sequence: &mut Sequence) -> Result<(), ModelError> {
        let Some(mut file) = sequence.swapped.take() else {
            return Ok(());
        };
        let result = self.check_owned(sequence).and_then(|()| {
            let result = self.read_swapped(sequence, &mut file);
            if result.is_err() {
                sequence.kv.truncate(0);
            }
            result
        });
        if result.is_err() {
            sequence.swapped = Some(file);
        }
        result
    }

    fn read_swapped(
        &mut self,
        sequence: &mut Sequence,
        file: &mut SwapFile,
    ) -> Result<(), ModelError> {
        let len = sequence.len();
        let pages = pages_for(len);
        let mut known = self.prefixes.find(&sequence.ids);
        known.pages.truncate(known.tokens / PAGE);
        let shared = known.pages.len();
        known
            .pages
            .into_iter()
            .for_each(|page| sequence.kv.push(page));
        if !self.reserve_one(&mut sequence.kv, shared * PAGE, pages * PAGE) {
            return Err(ModelError::OutOfPages {
                needed: pages - shared,
                free: self.free_pages(),
            });
        }
        let dir = self.swap_dir();
        let failed = |source: io::Error| ModelError::Swap {
            dir: dir.clone(),
            source,
        };
        let page_values = self.pages.layout().values();
        file.seek(shared * page_values).map_err(&failed)?;
        for index in shared..pages {
            file.read(sequence.kv.page_mut(index)).map_err(&failed)?;
        }
        let Some(draft) = &mut sequence.draft else {
            return Ok(());
        };
        let draft_values = draft.kv.layout().values();
        let (first, seen) = (draft.first, draft.seen);
        if seen > first {
            if self.reserve_drafts(draft, first + 1, seen + 1).is_err() {
                // Where it has no pages, the prediction layer begins anew.
                draft.begin_at(0);
                return Ok(());
            }
            file.seek(file.pages * page_values).map_err(&failed)?;
            for index in 0..draft.kv.pages().len() {
                file.read(draft.kv.page_mut(index)).map_err(&failed)?;
            }
        }
        let unseen = len.saturating_sub(seen) * self.weights.config().hidden_size;
        draft.hidden = vec![0.0; unseen.min(file.hidden)];
        let hidden_at = file.pages * page_values + file.drafts * draft_values;
        file.seek(hidden_at).map_err(&failed)?;
        file.read(&mut draft.hidden).map_err(&failed)
    }

    /// Continues where a sequence of the same model, with the same settings, had computed `ids`: `fill` is given a writer for its rows, of
    /// lists as in `shape`. What the sequence had is forgotten. Only one of the two may have the prediction layer.
    ///
    /// # Errors
    /// [`ModelError::Cache`] when layers, widths or lengths are others, [`ModelError::Token`] for an id outside the vocabulary,
    /// [`ModelError::ContextTooLong`], [`ModelError::OutOfPages`], and those of `fill`. The sequence is then as before.
    pub fn restore<E: From<ModelError>>(
        &mut self,
        sequence: &mut Sequence,
        ids: Vec<u32>,
        shape: &KvShape,
        fill: impl FnOnce(&mut KvWriter<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.check_owned(sequence)?;
        let drafts = self.draft_pages.as_ref().map(PagePool::layout);
        let own = [self.pages.layout().shape().0.clone()];
        let own = own
            .into_iter()
            .chain(drafts.map(|layout| layout.shape().0.clone()));
        let own = KvShape(own.flatten().collect());
        let cannot = |what| E::from(ModelError::Cache { what });
        if !shape.agrees_with(&own) {
            return Err(cannot("it has other layers, or rows of other widths"));
        }
        if !ids.is_empty() {
            self.check_ids(&ids)?;
            check_context(self.weights.config(), ids.len())?;
        }
        let mut new = self.sequence();
        if !self.reserve_one(&mut new.kv, 0, ids.len()) {
            return Err(E::from(ModelError::OutOfPages {
                needed: pages_for(ids.len()),
                free: self.free_pages(),
            }));
        }
        if let Some(draft) = &mut new.draft {
            self.reserve_drafts(draft, 0, ids.len() + 1)?;
        }
        let mains = new.kv.layout().row_lists();
        let mut writer = KvWriter {
            main: &mut new.kv,
            draft: new.draft.as_mut().map(|draft| &mut draft.kv),
            tokens: ids.len(),
            filled: Vec::new(),
        };
        fill(&mut writer)?;
        let lists = shape.lists().count();
        let (least, most) = (writer.least(0..mains), writer.most(0..mains));
        let (seen, most_seen) = match lists > mains {
            true => (writer.least(mains..lists), writer.most(mains..lists)),
            false => (0, 0),
        };
        if least != ids.len() || most != ids.len() || most_seen > ids.len() {
            return Err(cannot(
                "a layer has more or fewer rows than there are tokens",
            ));
        }
        if let Some(draft) = &mut new.draft {
            draft.seen = seen;
            draft.cut(seen);
        }
        (new.ids, new.born) = (ids, sequence.born);
        if sequence.draft.is_none() {
            new.draft = None;
        }
        *sequence = new;
        Ok(())
    }
}
