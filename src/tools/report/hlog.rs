//! Writes an HdrHistogram interval log: one tagged histogram for each measurement, for the standard viewers.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};

/// One measurement.
#[derive(Clone, Debug)]
pub struct Interval<'a> {
    /// What was measured, in one word.
    pub tag: String,
    /// When it began.
    pub start: SystemTime,
    /// How long it took.
    pub duration: Duration,
    /// Time of each read in microseconds.
    pub latency_us: &'a Histogram<u64>,
}

/// How every log begins that is written here; others begin with a comment, too.
pub const BEGIN: &str = "#colibri-uring: ";

/// Writes the log. Values are nanoseconds, as viewers expect them, and each line's maximum is in milliseconds.
///
/// # Errors
/// When `out` fails.
pub fn write(mut out: impl Write, comment: &str, intervals: &[Interval<'_>]) -> io::Result<()> {
    let begin = intervals.first().map_or_else(SystemTime::now, |i| i.start);
    let mut serializer = V2DeflateSerializer::new();
    let mut builder = IntervalLogWriterBuilder::new();
    builder
        .add_comment(&format!("{}{comment}", &BEGIN[1..]))
        .with_start_time(begin)
        .with_base_time(begin)
        .with_max_value_divisor(1e6);
    let mut log = builder.begin_log_with(&mut out, &mut serializer)?;
    for interval in intervals {
        let tag: String = (interval.tag.chars())
            .map(|c| {
                if c == ',' || c.is_whitespace() {
                    '-'
                } else {
                    c
                }
            })
            .collect();
        let since = interval.start.duration_since(begin).unwrap_or_default();
        let nanoseconds = nanoseconds(interval.latency_us);
        log.write_histogram(&nanoseconds, since, interval.duration, Tag::new(&tag))
            .map_err(|e| io::Error::other(format!("{e:?}")))?;
    }
    Ok(())
}

fn nanoseconds(microseconds: &Histogram<u64>) -> Histogram<u64> {
    let mut scaled = Histogram::new_with_bounds(1000, 60_000_000_000, 3).expect("valid bounds");
    for step in microseconds.iter_recorded() {
        let value = step.value_iterated_to().saturating_mul(1000);
        scaled.saturating_record_n(value, step.count_at_value());
    }
    scaled
}
