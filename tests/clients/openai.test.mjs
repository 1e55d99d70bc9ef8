// Uses the server as a client of JavaScript's openai package does.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const options = { baseURL: `${process.env.SERVER_URL}/v1`, apiKey: "none", maxRetries: 0 };
const client = new OpenAI(options);
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Who came to the ball?" }];
const chat = (fields = {}, more = {}) => client.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0, ...fields }, more);
const complete = (fields = {}) => client.completions.create({ model, prompt: "The hummingbird", max_tokens: 24, temperature: 0, ...fields });

test("a streamed chat answer equals the whole one, its usage too", async () => {
  for (const fields of [{}, { temperature: 1, seed: 7 }]) {
    const whole = await chat(fields);
    let [text, finish, usage] = ["", null, null];
    for await (const chunk of await chat({ ...fields, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    assert.ok(text.length > 0);
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(finish, whole.choices[0].finish_reason);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
    assert.equal(usage.prompt_tokens, whole.usage.prompt_tokens);
  }
});

test("the stream helper puts the same message together", async () => {
  const whole = await chat({ seed: 3, temperature: 1 });
  const stream = client.chat.completions.stream({ model, messages, max_tokens: 24, temperature: 1, seed: 3 });
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
});

test("a streamed completion equals the whole one; text and ids are the same prompt", async () => {
  const whole = await complete({ echo: true, return_token_ids: true });
  let text = "";
  for await (const chunk of await complete({ stream: true })) text += chunk.choices[0]?.text ?? "";
  assert.ok(text.length > 0);
  assert.equal(whole.choices[0].text, `The hummingbird${text}`);
  assert.ok(whole.choices[0].token_ids.every(Number.isInteger));
});

test("a seed repeats, another does not", async () => {
  const texts = await Promise.all([1, 1, 2].map(async (seed) => (await chat({ temperature: 1, seed })).choices[0].message.content));
  assert.equal(texts[0], texts[1]);
  assert.notEqual(texts[0], texts[2]);
});

test("a stop string ends the answer before it", async () => {
  const text = (await chat()).choices[0].message.content;
  const stop = text.slice(text.length / 2, text.length / 2 + 4);
  const { choices: [choice] } = await chat({ stop });
  assert.equal(choice.message.content, text.slice(0, text.indexOf(stop)));
  assert.equal(choice.finish_reason, "stop");
});

test("n choices, log-probabilities", async () => {
  const { choices } = await chat({ n: 2, temperature: 1, seed: 5, logprobs: true, top_logprobs: 2 });
  assert.deepEqual(choices.map((choice) => choice.index).sort(), [0, 1]);
  for (const { message, logprobs } of choices) {
    assert.equal(Buffer.from(logprobs.content.flatMap((entry) => entry.bytes)).toString(), message.content);
    assert.ok(logprobs.content.every((entry) => entry.top_logprobs.length === 2));
  }
});

test("an aborted stream ends, and the next answer is right", async () => {
  const before = (await chat()).choices[0].message.content;
  const stream = await chat({ stream: true, max_tokens: 900 });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) break; // Leaving the loop closes the connection.
  }
  assert.ok(stream.controller.signal.aborted);
  assert.equal((await chat()).choices[0].message.content, before);
});

test("errors are the client's own types", async () => {
  await assert.rejects(chat({ temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && /temperature/.test(error.message));
  await assert.rejects(chat({ temperature: -1, stream: true }), OpenAI.BadRequestError);
  await assert.rejects(client.embeddings.create({ model, input: "text" }), OpenAI.NotFoundError);
  const keyed = (apiKey) => new OpenAI({ ...options, baseURL: `${process.env.KEYED_SERVER_URL}/v1`, apiKey });
  await assert.rejects(keyed("wrong").models.list(), OpenAI.AuthenticationError);
  assert.ok((await keyed(process.env.SERVER_KEY).models.list()).data.length > 0);
});
