// Connects the page: conversation, settings, keyboard, the server.

const CHAT = "colibri.chat";
const SETTINGS = "colibri.settings";
const KEY = "colibri.key";
const FIELDS = { temperature: "temperature", "max-tokens": "max_tokens", seed: "seed", system: "system" };

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // A full or forbidden storage costs the memory over a reload, not the chat.
  }
}

const messages = load(CHAT, []).filter((message) => ["user", "assistant"].includes(message?.role));
const settings = load(SETTINGS, {});
const narrator = new Narrator(byId("live"));
const views = new Map(); // message -> { root, update }
let model = "";
let running = null; // { message, controller } while an answer comes
let frame = 0;
const [scroller, input] = [byId("scroll"), byId("input")];

const key = () => sessionStorage.getItem(KEY) ?? "";
const keep = () => save(CHAT, messages);
let following = true; // the end of the conversation stays in view
const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };

function show(message) {
  const view = views.get(message);
  view?.update?.({ busy: running?.message === message, last: message === messages.at(-1) });
}

function showControls() {
  byId("empty").hidden = messages.length > 0;
  byId("new").disabled = messages.length === 0;
  const [shown, hidden] = running ? ["stop", "send"] : ["send", "stop"];
  const hadFocus = document.activeElement === byId(hidden);
  byId(shown).hidden = false;
  byId(hidden).hidden = true;
  if (hadFocus) byId(shown).focus();
}

function showMessages() {
  for (const [message, { root }] of views) {
    if (messages.includes(message)) continue;
    root.remove();
    views.delete(message);
  }
  for (const message of messages) {
    if (!views.has(message)) {
      const view = message.role === "user" ? { root: userElement(message) } : answerElement(message, { regenerate });
      views.set(message, view);
      byId("messages").append(view.root);
    }
    show(message);
  }
  showControls();
}

// Shows the running answer at most once a frame.
function schedule() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (!running) return;
    show(running.message);
    narrator.hear(running.message.content, false);
    if (following) toEnd();
    else byId("latest").hidden = false;
  });
}

function requestBody() {
  const body = { messages: [] };
  if (model) body.model = model;
  if (settings.system) body.messages.push({ role: "system", content: settings.system });
  for (const { role, content, reasoning } of messages.slice(0, -1)) {
    body.messages.push(reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  }
  for (const name of ["temperature", "max_tokens", "seed"]) {
    if (typeof settings[name] === "number") body[name] = settings[name];
  }
  return body;
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", failure: "The page was left before the answer was complete." };
  messages.push(message);
  running = { message, controller: new AbortController() };
  narrator.begin();
  showMessages();
  toEnd();
  keep();
  const saving = setInterval(keep, 1000);
  const { signal } = running.controller;
  try {
    await streamAnswer(requestBody(), message, { key: key(), signal, changed: schedule });
    delete message.failure;
  } catch (error) {
    if (signal.aborted) delete message.failure;
    else message.failure = error.message;
    message.stopped = signal.aborted;
    if (error.kind === "key") askForKey();
  }
  clearInterval(saving);
  delete message.prefill;
  running = null;
  showMessages();
  narrator.hear(message.content, true);
  if (message.stopped || message.failure) narrator.say(message.failure ?? "Stopped.");
  if (following) toEnd();
  keep();
}

function regenerate() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  answer();
  byId("stop").focus(); // The button that had the focus is gone.
}

function send() {
  const content = input.value.trim();
  if (running || !content) return;
  const last = messages.at(-1);
  if (last?.role === "assistant" && !last.content) messages.splice(-1); // It failed and says nothing.
  messages.push({ role: "user", content });
  input.value = "";
  answer();
}

function stop() {
  running?.controller.abort();
}

function askForKey() {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  if (document.activeElement === document.body || document.activeElement === input) byId("key").focus();
}

async function learnModel() {
  try {
    const response = await fetch("/v1/models", { headers: authorization(key()) });
    if (response.status === 401) askForKey();
    model = (await response.json()).data?.[0]?.id ?? "";
  } catch {
    model = ""; // The status line says that there is no connection.
  }
  if (!model) return;
  document.title = `${model} – colibri-uring`;
  for (const place of document.querySelectorAll(".model")) place.textContent = model;
}

function connectSettings() {
  const dialog = byId("settings");
  for (const [id, name] of Object.entries(FIELDS)) {
    const field = byId(id);
    field.value = settings[name] ?? "";
    field.addEventListener("input", () => {
      if (!field.checkValidity()) return;
      const value = field.type === "number" ? field.valueAsNumber : field.value.trim();
      if (value === "" || Number.isNaN(value)) delete settings[name];
      else settings[name] = value;
      save(SETTINGS, settings);
    });
  }
  byId("open-settings").onclick = () => dialog.showModal();
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
  };
}

function connectEngineToggle() {
  const wide = matchMedia("(min-width: 56.01rem)");
  const toggle = byId("toggle-engine");
  const open = (on) => {
    document.body.classList.toggle("engine-closed", !on);
    toggle.setAttribute("aria-expanded", String(on));
  };
  toggle.onclick = () => open(document.body.classList.contains("engine-closed"));
  wide.onchange = () => open(wide.matches);
  open(wide.matches);
}

function connectKeyboard() {
  input.addEventListener("keydown", (event) => {
    // An input method ends a composition with Enter, which sends nothing.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("settings").open || !running) return;
    event.preventDefault();
    stop();
  });
  if (matchMedia("(pointer: fine)").matches) input.focus(); // On a phone its keyboard would cover the page.
}

byId("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
byId("stop").onclick = stop;
byId("latest").onclick = () => {
  toEnd();
  input.focus();
};
// Only the reader scrolls up: a growing text or a smaller window leaves scrollTop where it is.
let lastTop = 0;
scroller.onscroll = () => {
  const { scrollTop, scrollHeight, clientHeight } = scroller;
  if (scrollHeight - scrollTop - clientHeight < 48) following = true;
  else if (scrollTop < lastTop) following = false;
  lastTop = scrollTop;
  if (following) byId("latest").hidden = true;
};
new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
byId("new").onclick = () => {
  running?.controller.abort();
  messages.length = 0;
  keep();
  showMessages();
  input.focus();
};
window.addEventListener("pagehide", keep);

connectSettings();
connectEngineToggle();
connectKeyboard();
showMessages();
toEnd();
if (!CSS.supports("field-sizing", "content")) {
  input.addEventListener("input", () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  });
}
const pollNow = watchEngine({
  key,
  refused: askForKey,
  connected: async () => {
    await learnModel();
    showState(model || "ready", false);
  },
});
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key-form").hidden = true;
  input.focus();
  pollNow();
  if (messages.at(-1)?.failure) regenerate();
};
