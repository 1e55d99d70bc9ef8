// Serves the page, and answers as a script says: states that the demo model does not reach, or not at a known time.
import { createServer } from "node:http";
import { once } from "node:events";

// One chunk of a streamed chat answer.
export function chunk(delta, more = {}) {
  return `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }], ...more })}\n\n`;
}

// The last chunk of a streamed chat answer and the end of the stream.
export function end(more = {}) {
  return `data: ${JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }], ...more })}\n\ndata: [DONE]\n\n`;
}

// An answer of one chunk.
export const says = (content) => (response) => stream(response).end(chunk({ content }) + end());

export function stream(response) {
  return response.writeHead(200, { "content-type": "text/event-stream" });
}

export function refuse(status, message, headers = {}) {
  return (response) => response.writeHead(status, headers).end(JSON.stringify({ error: { message } }));
}

// `page` is { body, headers } of the real server's `/`. Each chat request takes the next of `scripts`, functions of a response.
export class ScriptedServer {
  constructor(page, { key = "", metrics = "" } = {}) {
    Object.assign(this, { page, key, metrics, scripts: [], requests: [], polls: 0 });
    this.http = createServer((request, response) => this.answer(request, response));
  }

  async listen() {
    this.http.listen(0, "127.0.0.1");
    await once(this.http, "listening");
    this.url = `http://127.0.0.1:${this.http.address().port}`;
    return this;
  }

  async answer(request, response) {
    if (request.url === "/") return response.writeHead(200, this.page.headers).end(this.page.body);
    if (this.key && request.headers.authorization !== `Bearer ${this.key}`) return refuse(401, "The key is wrong.")(response);
    if (request.url === "/metrics") {
      this.polls += 1;
      return response.end(typeof this.metrics === "function" ? this.metrics() : this.metrics);
    }
    if (request.url === "/v1/models") return response.end(JSON.stringify({ data: [{ id: "scripted" }] }));
    if (request.url !== "/v1/chat/completions") return refuse(404, "No such path.")(response);
    let body = "";
    for await (const part of request) body += part;
    this.requests.push(JSON.parse(body));
    return (this.scripts.shift() ?? refuse(500, "No script is left."))(response);
  }

  close() {
    this.http.close();
    this.http.closeAllConnections();
  }
}
