// Requests one chat answer and reads its stream of server-sent events.

// An answer that did not come or did not end. `kind` is key, busy, unavailable, refused or lost.
class Failure extends Error {
  constructor(kind, text) {
    super(text);
    this.kind = kind;
  }
}

const LOST = "The connection to the server was lost.";

async function failureOf(response) {
  let detail = "";
  try {
    detail = (await response.json()).error?.message ?? "";
  } catch {
    // The body is no JSON; the status has to do.
  }
  const seconds = Number(response.headers.get("retry-after"));
  const when = seconds > 0 ? ` Try again in ${seconds} s.` : "";
  switch (response.status) {
    case 401:
      return new Failure("key", detail || "The API key is missing or wrong.");
    case 429:
      return new Failure("busy", `${detail || "The server's queue is full."}${when}`);
    case 503:
      return new Failure("unavailable", `${detail || "The server is loading or stopping."}${when}`);
    default:
      return new Failure("refused", detail || `The server answered ${response.status}.`);
  }
}

function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Yields each line of a stream that is not empty, without its line end.
async function* linesOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.trim()) yield line.trimEnd();
  }
}

// Adds what one event says to `message`. Returns true at the end of the stream.
function apply(line, message) {
  const progress = /^: prefill (\d+)\/(\d+)/.exec(line);
  if (progress) {
    message.prefill = [Number(progress[1]), Number(progress[2])];
    return false;
  }
  if (!line.startsWith("data:")) return false;
  const data = line.slice(5).trim();
  if (data === "[DONE]") return true;
  const event = JSON.parse(data);
  if (event.error) throw new Failure("unavailable", event.error.message ?? "The server ended the answer.");
  const choice = event.choices?.[0];
  message.content += choice?.delta?.content ?? "";
  message.reasoning += choice?.delta?.reasoning_content ?? "";
  message.finish = choice?.finish_reason ?? message.finish;
  message.usage = event.usage ?? message.usage;
  message.timings = event.timings ?? message.timings;
  return false;
}

// Streams the answer into `message` and calls `changed` after each event. Throws a Failure, or an AbortError after a stop.
async function streamAnswer(body, message, { key, signal, changed }) {
  const request = {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  };
  try {
    const response = await fetch("/v1/chat/completions", request);
    if (!response.ok) throw await failureOf(response);
    for await (const line of linesOf(response.body)) {
      if (apply(line, message)) return;
      changed();
    }
  } catch (error) {
    if (error instanceof Failure || signal.aborted) throw error;
    throw new Failure("lost", LOST);
  }
  throw new Failure("lost", "The connection ended before the answer was complete.");
}
