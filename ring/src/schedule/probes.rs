//! Measures drives with reads that nothing waits for.
//!
//! A demand is no good probe: on a drive that turns out to be slow, the caller waits for it. So an idle drive is measured by a copy
//! of a chunk that another drive reads, into memory that nothing uses. Drives are measured before the first demand, and again after
//! a second without a read.

use std::time::Duration;

use super::job::{InFlight, Waiting};
use super::outcome::{Outcome, outcome};
use super::{Completion, Op, Scheduler};
use crate::arena::SlabId;
use crate::event::Priority;
use crate::extent::Chunk;

/// The state of all probes.
#[derive(Debug)]
pub(crate) struct Probes {
    /// The slab that drive 0 writes into; the others follow.
    scratch: SlabId,
    /// The chunk that was launched last.
    pub(super) latest: Option<Chunk>,
    /// By drive.
    drives: Vec<Probing>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Probing {
    ended: u32,
    /// The last one was faster than the drive is thought to be.
    again: bool,
}

impl Probes {
    /// Bytes of the largest probe: a chunk of the usual size.
    pub(crate) const BYTES: u64 = 512 << 10;
    /// Bytes of the first, which decides which drive gets the first demands.
    const FIRST: u64 = 64 << 10;
    /// Probes of two sizes, before the drive counts as known.
    const AT_START: u32 = 3;
    /// How long a drive may be idle before it is measured again.
    const EVERY: Duration = Duration::from_secs(1);
    /// A drive that takes less than this part of the time that was expected is measured on.
    const FASTER: f64 = 0.8;
}

impl Scheduler {
    /// Measures drives from now on with reads into the slabs from `scratch` on, one for each drive, of [`Probes::BYTES`]. Nothing
    /// reads these slabs.
    pub(crate) fn probe_into(&mut self, scratch: SlabId) {
        self.probes = Some(Probes {
            scratch,
            latest: None,
            drives: vec![Probing::default(); self.fleet.drives.len()],
        });
        self.fleet.probing = true;
    }

    /// The next probe of an idle drive, if it is time for one.
    pub(super) fn probe(&mut self, now: Duration) -> Option<Op> {
        let probes = self.probes.as_ref()?;
        let due = |d: &usize| {
            let (drive, probing) = (&self.fleet.drives[*d], probes.drives[*d]);
            drive.measured
                && drive.reads_in_flight == 0
                && (probing.ended < Probes::AT_START
                    || probing.again
                    || now.saturating_sub(drive.last) >= Probes::EVERY)
        };
        let found = (0..probes.drives.len()).filter(due);
        let (drive, (chunk, copy)) = found
            .filter_map(|d| Some((d, self.probed_chunk(probes, d)?)))
            .next()?;
        let slab = SlabId(probes.scratch.0 + drive as u32);
        let line = self.fleet.drives[drive].line(now, false);
        let route = &self.files[chunk.file as usize][copy as usize];
        let flight = InFlight {
            slab,
            waiting: Waiting {
                chunk,
                done: 0,
                failed: 0,
                interrupted: 0,
            },
            copy,
            direct: route.access.is_direct(),
            drive,
            priority: Priority::Preload,
            since: now,
            probe: Some(line.map_or(f64::INFINITY, |line| line.seconds(chunk.len))),
        };
        Some(self.launch(flight))
    }

    /// A chunk that the drive has a copy of: the one that was launched last, or one from the middle of a file.
    fn probed_chunk(&self, probes: &Probes, drive: usize) -> Option<(Chunk, u8)> {
        let copy = |file: u32| {
            let copies = &self.files[file as usize];
            let copy = copies.iter().position(|c| c.drive == drive && !c.failed)?;
            Some(copy as u8)
        };
        let middle = |file: u32| {
            let size = self.files[file as usize][0].replica.file.size();
            let offset = size / 2 / self.align * self.align;
            let len = (size - offset).next_multiple_of(self.align);
            (len > 0).then_some(Chunk {
                file,
                offset,
                len,
                slab_offset: 0,
                payload: [0, 0],
            })
        };
        let latest = probes.latest.filter(|c| copy(c.file).is_some());
        let chunk = latest.or_else(|| {
            let files = 0..self.files.len() as u32;
            files.filter(|f| copy(*f).is_some()).find_map(middle)
        })?;
        let most = match probes.drives[drive].ended % 2 {
            0 if probes.drives[drive].ended < Probes::AT_START => Probes::FIRST,
            _ => Probes::BYTES,
        };
        let chunk = Chunk {
            len: chunk
                .len
                .min(most / self.align * self.align)
                .max(self.align),
            slab_offset: 0,
            payload: [0, 0],
            ..chunk
        };
        Some((chunk, copy(chunk.file)?))
    }

    /// Takes the end of a probe that was expected to take `expected` seconds. A copy that fails is avoided from now on.
    pub(super) fn end_probe(
        &mut self,
        flight: InFlight,
        expected: f64,
        ended: Completion,
        now: Duration,
    ) {
        let chunk = flight.waiting.chunk;
        let route = &mut self.files[chunk.file as usize][flight.copy as usize];
        let end = (chunk.offset + chunk.len).min(route.replica.file.size());
        let requested = end.saturating_sub(chunk.offset);
        let drive = &mut self.fleet.drives[flight.drive];
        let outcome = outcome(ended.result, requested, self.align);
        let delivered = outcome.bytes();
        drive.complete(chunk.len, delivered, now);
        let faster = now.saturating_sub(flight.since).as_secs_f64() < Probes::FASTER * expected;
        if let Some(probes) = &mut self.probes {
            let probing = &mut probes.drives[flight.drive];
            probing.ended = probing.ended.saturating_add(1);
            probing.again = faster && delivered > 0;
        }
        self.stats.probe_bytes += delivered;
        match outcome {
            Outcome::Refused(e) if flight.direct && route.may_be_buffered() => route.buffer(&e),
            Outcome::Done(_) | Outcome::Short(_) | Outcome::Interrupted(_) => {}
            Outcome::Refused(e) | Outcome::Failed(e) => {
                let error = self.read_error(&flight, e);
                self.avoid(&error, flight.copy);
            }
        }
        // Else demands would wait for ever for drives that all fail.
        let drive = &mut self.fleet.drives[flight.drive];
        if !drive.is_known() {
            drive.give_up();
        }
    }
}
