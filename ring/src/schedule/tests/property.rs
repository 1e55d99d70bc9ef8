//! Tests that every slab ends once, whatever the drives do.

use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 256 }))]

    /// Whatever fails, comes short or is dropped, in whatever order reads end: every slab ends exactly once, a full
    /// slab has had every byte written, and nothing is written after the end.
    #[test]
    fn every_slab_ends_once(
        jobs in prop::collection::vec(
            (prop::collection::vec((0u32..2, 0u64..200_000, 1u64..100_000, 0u8..2), 1..4), any::<bool>()), 1..6),
        choices in prop::collection::vec((0u8..12, any::<prop::sample::Index>()), 400),
        copies in 1usize..4,
        chunk in 1u64..60_000,
    ) {
        let mut s = Scheduler::new(jobs.len(), &files(2, copies), Window { bytes: 100_000, reads: 4 });
        let mut events = Vec::new();
        let mut layouts = Vec::new();
        for (i, (ranges, prefetch)) in jobs.iter().enumerate() {
            let (layout, c) = chunks(ranges, chunk);
            layouts.push(layout);
            let priority = if *prefetch { Priority::Prefetch } else { Priority::Demand };
            s.push(SlabId(i as u32), priority, &c, &mut events);
        }
        let mut ended = vec![0; jobs.len()];
        let mut written: Vec<std::collections::HashSet<u64>> = vec![Default::default(); jobs.len()];
        let mut at_device: Vec<Op> = Vec::new();
        let mut choices = choices.iter().cycle();
        loop {
            while let Some(op) = s.next(NOW) {
                prop_assert_eq!(ended[op.slab.index()], 0);
                at_device.push(op);
            }
            if at_device.is_empty() {
                break;
            }
            let (choice, which) = choices.next().unwrap();
            if *choice == 0 {
                s.drop_waiting(SlabId(which.index(jobs.len()) as u32), &mut events);
            }
            if *choice == 1 {
                s.promote(SlabId(which.index(jobs.len()) as u32));
            }
            let op = at_device.swap_remove(which.index(at_device.len()));
            let all = op.len.min(FILE_BYTES.saturating_sub(op.offset));
            let result = match choice {
                2 => Err(io::Error::from_raw_os_error(libc::EIO)),
                3 => Err(io::Error::from_raw_os_error(libc::EINTR)),
                4 | 5 if all > 4096 => Ok(4096 + (all - 4096) / 2),
                _ => Ok(all),
            };
            if let Ok(n) = result {
                written[op.slab.index()].extend((0..n).step_by(512).map(|b| op.slab_offset + b));
            }
            s.complete(Completion { id: op.id, result }, NOW, &mut events);
            for event in events.drain(..) {
                match event {
                    Event::Part(slab, part) => {
                        let layout = &layouts[slab.index()];
                        for (range, place) in layout.ranges().iter().zip(layout.places()) {
                            let bytes = *place..place + range.len;
                            let complete = bytes.step_by(512).chain([place + range.len - 1])
                                .all(|b| written[slab.index()].contains(&(b / 512 * 512)));
                            prop_assert!(range.part != part || complete);
                        }
                    }
                    Event::Full(slab) | Event::Dropped(slab) | Event::Failed(slab, _) => {
                        ended[slab.index()] += 1;
                        prop_assert!(at_device.iter().all(|op| op.slab != slab));
                    }
                }
            }
        }
        prop_assert!(s.is_idle());
        prop_assert!(ended.iter().all(|n| *n == 1), "{:?}", ended);
    }
}
