//! The report of `mirror bench`.

use super::{Bar, Bars, Page, Table};
use crate::tools::measure::Measured;
use crate::tools::report::Series;
use crate::tools::report::profile::{percentile_chart, percentiles};

/// What was measured.
#[derive(Clone, Debug)]
pub struct Mirrors<'a> {
    /// What was read.
    pub subject: &'a str,
    /// Each directory, and what it gave alone.
    pub single: Vec<(String, Option<&'a Measured>)>,
    /// All together.
    pub together: &'a Measured,
    /// What part of the bytes came from each.
    pub shares: &'a [f64],
    /// Speed over the sum, where that can be compared.
    pub scaling: Option<f64>,
    /// Why not, where it cannot.
    pub idle: &'a [String],
    /// On what it was measured, see [`super::machine::facts`].
    pub facts: &'a [(String, String)],
}

impl Mirrors<'_> {
    /// The report.
    pub fn page(&self) -> Page {
        let mut page = Page::new(&format!("Mirrors of {}", self.subject));
        let speed = self.together.mib_per_s();
        let count = self.single.len();
        page.verdict(&[match self.scaling {
            Some(scaling) => format!(
                "{count} directories together read {speed:.0} MiB/s, {scaling:.2} of the sum of what each gives alone."
            ),
            None => format!(
                "{speed:.0} MiB/s were read, which says nothing of {count} directories together: {}.",
                self.idle.join("; ")
            ),
        }]);
        page.facts(self.facts);
        page.section("Bandwidth");
        page.bars(&self.bars());
        page.section("Latency");
        let alone = self.single.iter().filter_map(|(dir, measured)| {
            let latency = &(*measured)?.latency_us;
            Some(Series {
                name: format!("{dir} alone"),
                points: percentiles(latency),
            })
        });
        let mut series: Vec<Series> = alone.collect();
        series.push(Series {
            name: "all together".into(),
            points: percentiles(&self.together.latency_us),
        });
        page.charts(&[percentile_chart("Time of a read, by percentile", series)]);
        page.section("All runs");
        page.table(&self.table());
        page
    }

    fn bars(&self) -> Bars {
        let alone = |i: usize| self.single[i].1.map_or(0.0, Measured::mib_per_s);
        let mut bars: Vec<Bar> = (self.single.iter().enumerate())
            .map(|(i, (dir, measured))| Bar {
                label: format!("{dir} alone"),
                parts: vec![(i, alone(i))],
                faint: false,
                note: measured.map_or("not measured: no whole expert".into(), |m| {
                    format!("{:.0} MiB/s", m.mib_per_s())
                }),
            })
            .collect();
        let sum: f64 = (0..self.single.len()).map(alone).sum();
        bars.push(Bar {
            label: "the sum of them".into(),
            parts: (0..self.single.len()).map(|i| (i, alone(i))).collect(),
            faint: true,
            note: format!("{sum:.0} MiB/s"),
        });
        let speed = self.together.mib_per_s();
        let shares: Vec<String> = (self.shares.iter())
            .map(|share| format!("{:.0}%", 100.0 * share))
            .collect();
        bars.push(Bar {
            label: format!("all together: shares of {}", shares.join(", ")),
            parts: (self.shares.iter().enumerate())
                .map(|(i, share)| (i, share * speed))
                .collect(),
            faint: false,
            note: format!("{speed:.0} MiB/s"),
        });
        Bars {
            title: "MiB/s of each drive alone, and of all together".into(),
            bars,
        }
    }

    fn table(&self) -> Table {
        let runs = (self.single.iter())
            .filter_map(|(dir, measured)| Some((format!("{dir} alone"), (*measured)?)))
            .chain([("all together".to_owned(), self.together)]);
        let ms = |us: u64| format!("{:.2}", us as f64 / 1000.0);
        let row = |(name, measured): (String, &Measured)| {
            let gib = measured.total() as f64 / f64::from(1 << 30);
            let latency = &measured.latency_us;
            vec![
                name,
                measured.device.to_owned(),
                format!("{:.0}", measured.mib_per_s()),
                format!("{gib:.2}"),
                format!(
                    "{:.4}",
                    measured.cpu.as_secs_f64() / gib.max(f64::MIN_POSITIVE)
                ),
                ms(latency.value_at_quantile(0.5)),
                ms(latency.value_at_quantile(0.99)),
                ms(latency.value_at_quantile(0.999)),
                ms(latency.max()),
            ]
        };
        let head = [
            "drives",
            "engine",
            "MiB/s",
            "GiB read",
            "CPU s/GiB",
            "p50 ms",
            "p99 ms",
            "p99.9 ms",
            "max ms",
        ];
        Table {
            head: head.map(str::to_owned).into(),
            rows: runs.map(row).collect(),
        }
    }
}
