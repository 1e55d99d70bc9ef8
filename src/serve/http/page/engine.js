// Shows what the engine does: polls /metrics once a second while the page is visible.

const PERIOD = 1000; // ms
const WINDOW = 5; // s, of the averages
const HISTORY = 60; // s, of the curve
const SERIES = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function parseMetrics(text) {
  const series = [];
  for (const line of text.split("\n")) {
    const match = SERIES.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
    }
    series.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return series;
}

function total(series, name, labels = {}) {
  const matches = (one) => one.name === name && Object.entries(labels).every(([key, value]) => one.labels[key] === value);
  return series.filter(matches).reduce((sum, one) => sum + one.value, 0);
}

function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

const percent = (share) => `${number(100 * share)}%`;
const perSecond = (value) => number(value, value === 0 || value >= 100 ? 0 : value < 10 ? 2 : 1);
const byId = (id) => document.getElementById(id);
const setText = (id, text) => { byId(id).textContent = text; };
const setWidth = (bar, share) => { bar.style.width = `${100 * Math.min(1, Math.max(0, share))}%`; };

const samples = []; // { time in s, series }, oldest first
const curve = []; // { time in s, rate in tokens a second }
const fastest = new Map(); // a drive's highest bytes a second
const driveRows = new Map();

// Growth of a counter over the last seconds: [growth, seconds].
function growth(name, labels) {
  const [old, now] = [samples[0], samples.at(-1)];
  return [total(now.series, name, labels) - total(old.series, name, labels), Math.max(now.time - old.time, 1e-3)];
}

function addSample(series) {
  const time = performance.now() / 1000;
  const last = samples.at(-1);
  const restarted = last && total(series, "colibri_compute_seconds_total") < total(last.series, "colibri_compute_seconds_total");
  // Averages over a time in which nothing was polled would hide what happens now.
  if (restarted || (last && time - last.time > 2 * WINDOW)) samples.length = 0;
  samples.push({ time, series });
  while (samples.length > 2 && time - samples[1].time >= WINDOW) samples.shift();
}

function showRate() {
  if (samples.length < 2) return; // A rate needs two.
  const { time } = samples.at(-1);
  const [tokens, seconds] = growth("colibri_generated_tokens_total");
  const rate = tokens / seconds;
  curve.push({ time, rate });
  while (curve.length && time - curve[0].time > HISTORY) curve.shift();
  const peak = Math.max(...curve.map((point) => point.rate));
  const at = (point) => `${(240 * (1 - (time - point.time) / HISTORY)).toFixed(1)} ${(35 - 33 * (peak ? point.rate / peak : 0)).toFixed(1)}`;
  const line = curve.map(at).join("L");
  document.querySelector("#spark .line").setAttribute("d", `M${line}`);
  document.querySelector("#spark .area").setAttribute("d", `M${at(curve[0]).split(" ")[0]} 36L${line}L240 36Z`);
  setText("rate", perSecond(rate));
  setText("peak", peak ? `peak ${perSecond(peak)}` : "");
  setText("digest", `${perSecond(rate)} tok/s`);
}

function showTime() {
  const [waited, seconds] = growth("colibri_io_wait_seconds_total");
  const [computed] = growth("colibri_compute_seconds_total");
  // Counters may be written a little later than their time passed.
  const all = Math.max(seconds, waited + computed);
  const shares = { wait: waited / all, compute: computed / all };
  const idle = Math.max(0, 1 - shares.wait - shares.compute);
  for (const [name, share] of Object.entries(shares)) {
    setWidth(document.querySelector(`#time-bar .${name}`), share);
    setText(`${name}-share`, percent(share));
  }
  setText("idle-share", percent(idle));
  byId("time-bar").setAttribute("aria-label", `Waiting for drives ${percent(shares.wait)}, computing ${percent(shares.compute)}, idle ${percent(idle)}`);
}

function showExperts() {
  let [hits, seconds] = growth("colibri_expert_hits_total");
  let [misses] = growth("colibri_expert_misses_total");
  setText("miss-rate", `${perSecond(misses / seconds)} /s`);
  const recent = hits + misses > 0;
  if (!recent) {
    const { series } = samples.at(-1);
    [hits, misses] = [total(series, "colibri_expert_hits_total"), total(series, "colibri_expert_misses_total")];
  }
  const known = hits + misses > 0;
  setText("hit-period", known ? (recent ? "last 5 s" : "since start") : "");
  setText("hit-share", known ? percent(hits / (hits + misses)) : "–");
  setWidth(byId("hit-bar"), known ? hits / (hits + misses) : 0);
}

function driveRow(source) {
  const row = element("div");
  const name = element("dt");
  name.textContent = source;
  const parts = { rate: element("dd", "rate"), errors: element("dd", "bad"), fill: element("i", "compute") };
  const bar = element("dd", "bar");
  bar.append(parts.fill);
  row.append(name, bar, parts.rate, parts.errors);
  if (!driveRows.size) byId("drives").replaceChildren();
  byId("drives").append(row);
  driveRows.set(source, parts);
  return parts;
}

function showDrives() {
  const { series } = samples.at(-1);
  for (const { labels } of series.filter((one) => one.name === "colibri_read_bytes_total")) {
    const source = labels.source ?? "";
    const row = driveRows.get(source) ?? driveRow(source);
    const [read, seconds] = growth("colibri_read_bytes_total", { source });
    const errors = total(series, "colibri_read_errors_total", { source });
    fastest.set(source, Math.max(fastest.get(source) ?? 0, read / seconds));
    row.rate.textContent = `${bytes(read / seconds)}/s`;
    row.errors.textContent = errors ? `${number(errors)} read errors` : "";
    row.errors.hidden = !errors;
    setWidth(row.fill, read / seconds / (Math.max(...fastest.values()) || 1));
  }
}

function showTotals() {
  const { series } = samples.at(-1);
  for (const state of ["running", "waiting", "swapped"]) setText(state, number(total(series, `colibri_requests_${state}`)));
  const [pages, free] = [total(series, "colibri_kv_pages"), total(series, "colibri_kv_pages_free")];
  setText("pages", `${number(pages - free)} of ${number(pages)}`);
  setWidth(byId("pages-bar"), pages ? 1 - free / pages : 0);
  const [prompts, cached] = [total(series, "colibri_prompt_tokens_total"), total(series, "colibri_cached_tokens_total")];
  setText("generated", `${number(total(series, "colibri_generated_tokens_total"))} tok`);
  setText("prompts", `${number(prompts)} tok`);
  setText("cached", prompts ? percent(cached / prompts) : "–");
  const outcomes = ["refused", "failed"].map((outcome) => total(series, "colibri_requests_total", { outcome }));
  setText("failures", outcomes.map((count) => number(count)).join(", "));
  setText("resident", bytes(total(series, "colibri_resident_memory_bytes")));
  setText("version", series.find((one) => one.name === "colibri_info")?.labels.version ?? "–");
}

function showEngine(text) {
  addSample(parseMetrics(text));
  for (const show of [showRate, showTime, showExperts, showDrives, showTotals]) show();
}

function showState(text, bad) {
  if (byId("state").textContent !== text) setText("state", text);
  byId("status").classList.toggle("bad", bad);
  byId("engine").classList.toggle("stale", bad);
  byId("stale").hidden = !bad;
  if (bad) setText("stale", `${text}. These figures are the last.`);
}

// `connected` is called when the server answers after it did not; `refused` when it asks for a key.
function watchEngine({ key, connected, refused }) {
  let timer = 0;
  let wasConnected = false;
  const poll = async () => {
    timer = 0;
    try {
      const response = await fetch("/metrics", { headers: authorization(key()), signal: AbortSignal.timeout(5000) });
      if (response.ok) {
        showEngine(await response.text());
        if (!wasConnected) connected();
        wasConnected = true;
      } else {
        wasConnected = false;
        if (response.status === 401) refused();
        showState({ 401: "API key needed", 503: "The server is loading or stopping" }[response.status] ?? `/metrics answered ${response.status}`, true);
      }
    } catch {
      wasConnected = false;
      showState("No connection", true);
    }
    if (document.visibilityState === "visible" && !timer) timer = setTimeout(poll, PERIOD);
  };
  const restart = () => {
    clearTimeout(timer);
    timer = 0;
    if (document.visibilityState === "visible") timer = setTimeout(poll, 0);
  };
  document.addEventListener("visibilitychange", restart);
  restart();
  return restart;
}
