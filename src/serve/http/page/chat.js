// Shows the messages of the conversation, one element each.

const sentences = /[^.!?\n]*(?:[.!?]+(?=\s)|\n)/g;

function seconds(value) {
  return `${number(value, value < 10 ? 2 : 1)} s`;
}

// What the server measured, as short facts.
function factsOf({ finish, usage, timings, stopped }) {
  const facts = [];
  if (usage) facts.push(`${number(usage.completion_tokens)} tokens`);
  if (timings?.tokens_per_second) facts.push(`${perSecond(timings.tokens_per_second)} tok/s`);
  if (timings?.queue_seconds >= 0.01) facts.push(`queued ${seconds(timings.queue_seconds)}`);
  if (timings) {
    const cached = timings.cached_tokens ? `, ${number(timings.cached_tokens)} of ${number(usage?.prompt_tokens ?? 0)} cached` : "";
    facts.push(`prompt ${seconds(timings.prefill_seconds)}${cached}`);
    facts.push(`decode ${seconds(timings.decode_seconds)}`);
    facts.push(`waited ${seconds(timings.io_wait_seconds)} for drives`);
  }
  if (stopped) facts.push("stopped");
  if (finish === "length") facts.push("cut at max tokens");
  return facts;
}

function button(label, action, classes = "quiet") {
  const made = element("button", classes, label);
  made.type = "button";
  made.onclick = () => action(made);
  return made;
}

function userElement(message) {
  const made = element("article", "message user");
  made.append(element("span", "unseen", "You: "), message.content);
  return made;
}

// The element of an answer. `update(state)` makes it show what the message has now.
function answerElement(message, { regenerate }) {
  const root = element("article", "message assistant");
  const reasoning = element("details", "reasoning");
  const summary = element("summary");
  const thoughts = element("div", "text");
  reasoning.append(summary, thoughts);
  const progress = element("p", "progress");
  const bar = element("progress");
  const label = element("span");
  progress.append(bar, label);
  const text = element("div", "text");
  const failure = element("div", "failure");
  const foot = element("footer", "foot");
  root.append(element("span", "unseen", "Answer:"), reasoning, progress, text, failure, foot);

  const showProgress = (busy) => {
    progress.hidden = !busy || Boolean(message.content || message.reasoning);
    const [done, all] = message.prefill ?? [0, 0];
    bar.hidden = !all;
    bar.max = all || 1;
    bar.value = done;
    bar.setAttribute("aria-label", "Prompt");
    label.textContent = all ? `Reading the prompt: ${number(done)} of ${number(all)} tokens` : "Waiting for the first token";
  };

  const update = ({ busy, last }) => {
    root.classList.toggle("busy", busy);
    root.setAttribute("aria-busy", String(busy));
    reasoning.hidden = !message.reasoning;
    summary.textContent = busy && !message.content ? "Reasoning …" : "Reasoning";
    renderMarkdown(thoughts, message.reasoning);
    renderMarkdown(text, message.content);
    showProgress(busy);
    failure.hidden = busy || !message.failure;
    foot.hidden = busy;
    failure.replaceChildren();
    foot.replaceChildren();
    if (busy) return;
    if (message.failure) {
      failure.append(element("span", "", message.failure));
      if (last) failure.append(button("Try again", regenerate, "retry"));
    }
    const facts = element("div", "facts");
    facts.append(...factsOf(message).map((fact) => element("span", "", fact)));
    if (facts.childNodes.length) foot.append(facts);
    const actions = element("div", "actions");
    if (message.content) actions.append(button("Copy", (self) => copyText(self, message.content)));
    if (last && !message.failure) actions.append(button("Regenerate", regenerate));
    foot.append(actions);
  };
  return { root, update };
}

// Reads an answer to a screen reader sentence by sentence: a live region that grows by words is unusable.
class Narrator {
  constructor(region) {
    this.region = region;
  }

  begin() {
    this.told = 0;
    this.region.replaceChildren();
  }

  hear(text, complete) {
    sentences.lastIndex = this.told;
    let end = complete ? text.length : this.told;
    while (!complete && sentences.exec(text)) end = sentences.lastIndex;
    const news = text.slice(this.told, end).trim();
    this.told = end;
    if (news) this.region.append(element("p", "", news));
  }

  say(text) {
    this.region.append(element("p", "", text));
  }
}
