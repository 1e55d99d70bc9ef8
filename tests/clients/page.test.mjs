// Uses the chat page in Chromium: against the server with the demo model, and against scripted answers.
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { after, afterEach, before, beforeEach, describe, test } from "node:test";
import { chromium } from "playwright-core";
import { ScriptedServer, chunk, end, refuse, says, stream } from "./scripted.mjs";

const REAL = process.env.SERVER_URL;
const KEYED = process.env.KEYED_SERVER_URL;
const KEY = process.env.SERVER_KEY;

let browser;
let context;
let page;
let complaints; // console errors, exceptions, requests to other hosts

before(async () => {
  browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
});
after(() => browser?.close());

async function open(url, options = {}) {
  context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  page = await context.newPage();
  complaints = [];
  page.on("pageerror", (error) => complaints.push(error.stack));
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  page.on("request", (request) => /^(data:|blob:)/.test(request.url()) || request.url().startsWith(`${url}/`) || complaints.push(request.url()));
  const response = await page.goto(url);
  await page.locator("#input").waitFor();
  return response;
}

// Waits until `check`, run in the page, is true.
const until = (check, argument) => page.waitForFunction(check, argument, { timeout: 30_000 });
const idle = () => page.locator("#send").waitFor({ timeout: 60_000 });
const answers = () => page.locator(".assistant > .text").allInnerTexts();
const press = (...keys) => keys.reduce((before, key) => before.then(() => page.keyboard.press(key)), Promise.resolve());

async function ask(text) {
  await page.locator("#input").fill(text);
  await press("Enter");
}

// Fails on what axe finds: contrast, names, roles, regions that the keyboard cannot reach.
async function isAccessible() {
  await page.evaluate(await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8"));
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map((node) => [node.html, node.failureSummary])]), []);
}

async function fits() {
  const [content, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(content <= window, `the content is ${content} px wide, the window ${window}`);
}

afterEach(() => context?.close());

describe("with the demo model", () => {
  test("streams an answer by keyboard alone and shows what the engine did", async () => {
    const response = await open(REAL);
    const policy = response.headers()["content-security-policy"];
    assert.match(policy, /default-src 'none'/);
    assert.doesNotMatch(policy, /unsafe/);

    await until(() => document.activeElement.id === "input");
    await page.keyboard.type("It is a truth");
    await press("Shift+Enter");
    await page.keyboard.type("universally acknowledged");
    await press("Enter");
    await idle();
    assert.match(await page.locator(".user").innerText(), /It is a truth\nuniversally acknowledged$/);
    assert.ok((await answers())[0].length > 0);
    assert.match(await page.locator(".facts").innerText(), /\d+ tokens.*decode .* s.*waited .* for drives/s);
    await until(() => /^[1-9][\d,]* tok$/.test(document.querySelector("#generated").textContent));
    await until(() => document.querySelectorAll("#drives .rate").length > 0);
    assert.notEqual(await page.locator("#hit-share").innerText(), "–");
    assert.deepEqual(complaints, []);
  });

  test("regenerates, keeps settings and conversation over a reload, begins anew", async () => {
    await open(REAL);
    await press("Shift+Tab", "Shift+Tab", "Shift+Tab"); // over the conversation and the engine's button
    assert.equal(await page.evaluate(() => document.activeElement.id), "open-settings");
    await press("Enter");
    await page.keyboard.type("Answer like a novel.");
    for (const value of ["0.8", "24", "7"]) {
      await press("Tab");
      await page.keyboard.type(value);
    }
    await press("Enter");
    assert.equal(await page.locator("#settings").isVisible(), false);

    await ask("Who came to the ball?");
    await idle();
    const [first] = await answers();
    await page.getByRole("button", { name: "Regenerate" }).click();
    await idle();
    assert.deepEqual(await answers(), [first], "the seed is fixed");

    await page.reload();
    assert.deepEqual(await answers(), [first]);
    assert.deepEqual(await page.evaluate(() => JSON.parse(localStorage["colibri.settings"])), { system: "Answer like a novel.", temperature: 0.8, max_tokens: 24, seed: 7 });
    await page.getByRole("button", { name: "New chat" }).click();
    assert.equal(await page.locator(".message").count(), 0);
    await page.reload();
    assert.equal(await page.locator(".message").count(), 0);
    assert.deepEqual(complaints, []);
  });

  for (const colorScheme of ["dark", "light"]) {
    for (const width of [360, 768, 1280]) {
      test(`fits into ${width} px in ${colorScheme} colours`, async () => {
        await open(REAL, { colorScheme, viewport: { width, height: 740 } });
        const luminance = await page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).reduce((sum, value) => sum + Number(value), 0));
        assert.equal(luminance > 384, colorScheme === "light");
        await fits();
        await ask("x".repeat(200));
        await idle();
        await fits();
        const engine = page.locator("#engine");
        const wasOpen = await engine.isVisible();
        assert.equal(wasOpen, width >= 1280);
        await page.locator("#toggle-engine").click();
        assert.equal(await engine.isVisible(), !wasOpen);
        await fits();
        await isAccessible();
        await page.locator("#open-settings").click();
        await fits();
        await isAccessible();
        assert.deepEqual(complaints, []);
      });
    }
  }

  test("asks for the key of a server that has one", async () => {
    await open(KEYED);
    await page.locator("#key").fill("wrong");
    await press("Enter");
    await page.locator("#key-form").waitFor();
    await page.locator("#key").fill(KEY);
    await press("Enter");
    await until(() => !/key/.test(document.querySelector("#state").textContent));
    await ask("Good morning");
    await idle();
    assert.equal(await page.locator(".failure").isVisible(), false);
    assert.equal(await page.evaluate((key) => JSON.stringify(localStorage).includes(key), KEY), false, "the key is not stored for good");
  });
});

describe("with scripted answers", () => {
  let server;
  let served;

  before(async () => {
    const response = await fetch(`${REAL}/`);
    served = { body: await response.text(), headers: Object.fromEntries(["content-type", "content-security-policy"].map((name) => [name, response.headers.get(name)])) };
  });
  beforeEach(async () => { server = await new ScriptedServer(served).listen(); });
  afterEach(() => server.close());

  test("Escape stops: the connection closes, the text stays, the next request has it", async () => {
    let closed;
    server.scripts.push((response) => {
      closed = once(response, "close");
      stream(response).write(chunk({ content: "Begun" }));
    }, says("Next"));
    await open(server.url);
    await ask("Go on for ever");
    await until(() => document.querySelector(".assistant > .text").innerText === "Begun");
    await press("Escape");
    await closed;
    await idle();
    assert.match(await page.locator(".facts").innerText(), /stopped/);
    await ask("And?");
    await until(() => document.querySelectorAll(".assistant > .text")[1]?.innerText === "Next");
    assert.deepEqual(server.requests[1].messages, [
      { role: "user", content: "Go on for ever" },
      { role: "assistant", content: "Begun" },
      { role: "user", content: "And?" },
    ]);
    assert.deepEqual(complaints, []);
  });

  test("folds reasoning and sends it back", async () => {
    server.scripts.push((response) => stream(response).end(chunk({ reasoning_content: "Six times " }) + chunk({ reasoning_content: "seven." }) + chunk({ content: "42" }) + end()), says("Yes"));
    await open(server.url);
    await ask("6 * 7?");
    await idle();
    const thoughts = page.locator(".reasoning .text");
    assert.equal(await thoughts.isVisible(), false);
    assert.deepEqual(await answers(), ["42"]);
    await page.locator(".reasoning summary").focus();
    await press("Enter");
    assert.equal(await thoughts.innerText(), "Six times seven.");
    await ask("Sure?");
    await until(() => document.querySelectorAll(".assistant").length === 2);
    await idle();
    assert.deepEqual(server.requests[1].messages[1], { role: "assistant", content: "42", reasoning_content: "Six times seven." });
  });

  const failures = {
    "a full queue": [refuse(429, "The queue is full.", { "retry-after": "3" }), /The queue is full\. Try again in 3 s\./],
    "a server that stops": [refuse(503, "The server is stopping."), /stopping/],
    "a refused field": [refuse(400, "temperature: 9 is above 2."), /temperature: 9/],
    "a lost connection": [(response) => stream(response).write(chunk({ content: "Half" }), () => response.destroy()), /connection/i],
    "a stream without its end": [(response) => stream(response).end(chunk({ content: "Half" })), /ended before/],
    "an error within the stream": [(response) => stream(response).end(`data: ${JSON.stringify({ error: { message: "A drive failed." } })}\n\n`), /A drive failed/],
  };
  for (const [name, [script, expected]] of Object.entries(failures)) {
    test(`shows ${name} at the answer, and tries again`, async () => {
      server.scripts.push(script, says("Whole"));
      await open(server.url);
      await ask("Hello");
      await page.locator(".failure").waitFor();
      assert.match(await page.locator(".failure").innerText(), expected);
      await isAccessible();
      await page.reload();
      assert.match(await page.locator(".failure").innerText(), expected);
      await page.getByRole("button", { name: "Try again" }).focus();
      await press("Enter");
      await until(() => document.querySelector(".assistant > .text").innerText === "Whole");
      await idle();
      assert.equal(await page.locator(".failure").isVisible(), false);
      // The model's name may not be known to the page when it sends the first one.
      const [first, second] = server.requests.map(({ model, ...request }) => request);
      assert.deepEqual(second, first);
    });
  }

  test("shows how much of the prompt is computed", async () => {
    let finish;
    server.scripts.push((response) => {
      stream(response).write(": prefill 512/4096\n\n");
      finish = () => response.end(chunk({ content: "Read." }) + end());
    });
    await open(server.url);
    await ask("A long text");
    await until(() => /512 of 4,096/.test(document.querySelector(".progress").innerText));
    assert.equal(await page.locator(".progress progress").getAttribute("value"), "512");
    finish();
    await idle();
    assert.equal(await page.locator(".progress").isVisible(), false);
  });

  test("shows markup of the model as text, and a subset of Markdown as elements", async () => {
    const text = [
      "<img src=/x onerror=alert(1)> <b>no</b> **bold** and `a<b>c`",
      "",
      "1. one",
      "   - inner",
      "2. two",
      "- three",
      "",
      "```html",
      "<script>alert(1)</script>",
      "```",
      "[link](javascript:alert(1))",
      "",
      "| a | b |",
      "|---|---|",
      "| 1 | 2 |",
    ].join("\n");
    server.scripts.push((response) => {
      stream(response);
      for (const letter of text) response.write(chunk({ content: letter }));
      response.end(end());
    });
    await open(server.url);
    await ask("<i>user</i>");
    await idle();
    const answer = page.locator(".assistant > .text");
    assert.equal(await page.locator(".user i, .assistant img, .assistant b, .assistant a, #messages script").count(), 0);
    assert.match(await page.locator(".user").innerText(), /<i>user<\/i>/);
    assert.match(await answer.innerText(), /<img src=\/x onerror=alert\(1\)> <b>no<\/b> bold/);
    assert.equal(await answer.locator("strong").innerText(), "bold");
    assert.equal(await answer.locator("p > code").innerText(), "a<b>c");
    assert.equal(await answer.locator("ol > li").count(), 2);
    assert.equal(await answer.locator(":scope > ul > li").innerText(), "three");
    assert.equal(await answer.locator("ol > li > ul > li").innerText(), "inner");
    assert.equal(await answer.locator("pre code").textContent(), "<script>alert(1)</script>");
    assert.deepEqual(await answer.locator("th, td").allInnerTexts(), ["a", "b", "1", "2"]);
    await isAccessible();
    assert.deepEqual(complaints, []);
  });

  test("follows the answer until the reader scrolls away", async () => {
    let more;
    server.scripts.push((response) => {
      const lines = (count) => chunk({ content: "line\n\n".repeat(count) });
      stream(response).write(lines(60));
      more = (count) => response.write(lines(count));
    });
    await open(server.url);
    await ask("Write much");
    const lines = (count) => until((expected) => document.querySelectorAll(".assistant > .text > p").length === expected, count);
    const atEnd = () => until(() => {
      const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#scroll");
      return scrollHeight > clientHeight && scrollHeight - scrollTop - clientHeight < 48;
    });
    await lines(60);
    await atEnd();
    await page.locator("#input").fill("a\nb\nc\nd"); // The field grows, the conversation shrinks.
    await until(() => document.querySelector("#input").clientHeight > 80);
    await atEnd();
    await page.locator("#scroll").focus();
    await press("Home");
    await until(() => document.querySelector("#scroll").scrollTop === 0);
    more(20);
    await lines(80);
    assert.equal(await page.evaluate(() => document.querySelector("#scroll").scrollTop), 0);
    await page.locator("#latest").click();
    await atEnd();
  });

  test("tells a screen reader whole sentences", async () => {
    let finish;
    server.scripts.push((response) => {
      stream(response).write(chunk({ content: "A first sentence. The sec" }));
      finish = () => response.end(chunk({ content: "ond one" }) + end());
    });
    await open(server.url);
    await ask("Hello");
    const told = () => page.locator("#live p").allTextContents();
    await until(() => document.querySelector("#live").textContent.includes("first"));
    assert.deepEqual(await told(), ["A first sentence."]);
    finish();
    await idle();
    assert.deepEqual(await told(), ["A first sentence.", "The second one"]);
  });

  test("computes rates and shares, and polls only while the page is visible", async () => {
    let second = 0;
    server.metrics = () => {
      second += 1;
      return [
        `colibri_generated_tokens_total ${second * 12}`,
        `colibri_io_wait_seconds_total ${second * 0.25}`,
        `colibri_compute_seconds_total ${second * 0.5}`,
        `colibri_expert_hits_total ${second * 90}`,
        `colibri_expert_misses_total ${second * 10}`,
        `colibri_read_bytes_total{source="/nvme0/a \\"b\\""} ${second * 3 * 2 ** 30}`,
        `colibri_read_errors_total{source="/nvme0/a \\"b\\""} 2`,
        "colibri_requests_running 3",
        "colibri_requests_waiting 1",
        "colibri_kv_pages 100",
        "colibri_kv_pages_free 25",
        'colibri_info{version="1.2.3",model="m"} 1',
      ].join("\n");
    };
    context = await browser.newContext();
    page = await context.newPage();
    await page.clock.install();
    await page.goto(server.url);
    const poll = async () => {
      const polls = server.polls;
      await page.clock.runFor(1000);
      await until((text) => document.querySelector("#generated").textContent === text, `${12 * (polls + 1)} tok`);
    };
    await page.clock.runFor(10);
    await until(() => document.querySelector("#generated").textContent === "12 tok");
    for (let count = 0; count < 8; count += 1) await poll();
    const shown = async (id) => page.locator(`#${id}`).innerText();
    assert.match(await shown("rate"), /^1[12]\.\d$/);
    assert.match(await shown("wait-share"), /^2[45]%$/);
    assert.match(await shown("compute-share"), /^(49|50)%$/);
    assert.equal(await shown("hit-share"), "90%");
    assert.match(await shown("drives"), /\/nvme0\/a "b"\s+(2\.9|3\.0) GiB\/s\s+2 read errors/);
    assert.deepEqual([await shown("running"), await shown("waiting"), await shown("pages"), await shown("version")], ["3", "1", "75 of 100", "1.2.3"]);

    const setVisibility = (state) => page.evaluate((value) => {
      Object.defineProperty(document, "visibilityState", { value, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }, state);
    await setVisibility("hidden");
    const polls = server.polls;
    await page.clock.runFor(20_000);
    assert.equal(server.polls, polls);
    await setVisibility("visible");
    await page.clock.runFor(10);
    await until((text) => document.querySelector("#generated").textContent === text, `${12 * (polls + 1)} tok`);
  });

  test("says that there is no connection, and finds the server again", async () => {
    await open(server.url);
    await until(() => document.querySelector("#state").textContent === "scripted");
    const { port } = new URL(server.url);
    server.close();
    await until(() => document.querySelector("#state").textContent === "No connection");
    const again = new ScriptedServer(served);
    again.http.listen(Number(port), "127.0.0.1");
    await until(() => document.querySelector("#state").textContent === "scripted");
    again.close();
  });
});
