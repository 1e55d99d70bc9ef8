"""Uses the server as a client of Python's openai package does."""

import asyncio
import json
import os
import subprocess
import time
import unittest
import urllib.request
from typing import Annotated

import openai
from pydantic import BaseModel, Field

URL = os.environ["SERVER_URL"]
KEYED_URL = os.environ["KEYED_SERVER_URL"]
KEY = os.environ["SERVER_KEY"]
PROGRAM = os.environ["PROGRAM"]

PROMPT = "It is a truth universally acknowledged, that"
MESSAGES = [{"role": "user", "content": "Who came to the ball?"}]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id


def complete(prompt=PROMPT, **fields):
    return client.completions.create(**{"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields})


def chat(messages=MESSAGES, **fields):
    return client.chat.completions.create(**{"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, **fields})


def program(*args):
    """The JSON that a run of the program prints, without the server."""
    run = subprocess.run([PROGRAM, *args, "--json", "--no-usage"], check=True, capture_output=True)
    return json.loads(run.stdout)


def metric(name):
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split(" ")[0].split("{")[0] == name)


class Completions(unittest.TestCase):
    def test_equals_decode(self):
        expected = program("decode", "--prompt", PROMPT, "-n", "24")
        answer = complete(extra_body={"return_token_ids": True})
        choice = answer.choices[0]
        self.assertEqual(choice.text, expected["text"])
        self.assertEqual(choice.token_ids, expected["token_ids"])
        self.assertEqual(choice.finish_reason, "length")
        self.assertEqual(answer.usage.prompt_tokens, len(expected["prompt_ids"]))
        self.assertEqual(answer.usage.completion_tokens, 24)
        self.assertEqual(answer.usage.total_tokens, len(expected["prompt_ids"]) + 24)
        self.assertEqual(complete(expected["prompt_ids"]).choices[0].text, expected["text"])

    def test_stream_equals_answer(self):
        for fields in ({}, {"temperature": 1, "seed": 7}):
            whole = complete(**fields)
            chunks = list(complete(stream=True, stream_options={"include_usage": True}, **fields))
            self.assertGreater(len(chunks), 3)
            self.assertEqual("".join(c.text for chunk in chunks for c in chunk.choices), whole.choices[0].text)
            self.assertEqual([c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason], ["length"])
            self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
            self.assertEqual(chunks[-1].usage.prompt_tokens, whole.usage.prompt_tokens)

    def test_stream_without_usage_has_none(self):
        self.assertTrue(all(chunk.usage is None for chunk in complete(stream=True)))

    def test_several_prompts(self):
        texts = [complete(prompt).choices[0].text for prompt in (PROMPT, "The hummingbird")]
        answer = complete([PROMPT, "The hummingbird"])
        self.assertEqual([c.text for c in sorted(answer.choices, key=lambda c: c.index)], texts)

    def test_echo_and_logprobs_equal_score(self):
        ids = program("decode", "--prompt", PROMPT, "-n", "1")["prompt_ids"]
        expected = program("score", "--ids", ",".join(map(str, ids)))["logprobs"]
        choice = complete(ids, echo=True, logprobs=2, max_tokens=1).choices[0]
        self.assertTrue(choice.text.startswith(PROMPT))
        found = choice.logprobs
        self.assertEqual(len(found.tokens), len(ids) + 1)
        self.assertIsNone(found.token_logprobs[0])
        for ours, score in zip(found.token_logprobs[1:-1], expected, strict=True):
            self.assertAlmostEqual(ours, score, places=4)
        self.assertEqual(found.token_logprobs[-1], max(found.top_logprobs[-1].values()))
        self.assertEqual("".join(found.tokens), choice.text)

    def test_logit_bias_forces_a_token(self):
        choice = complete(logit_bias={"304": 100}, max_tokens=5, extra_body={"return_token_ids": True}).choices[0]
        self.assertEqual(choice.token_ids, [304] * 5)


class Chat(unittest.TestCase):
    def test_stream_equals_answer(self):
        for fields in ({}, {"temperature": 1, "seed": 7}):
            whole = chat(**fields)
            message = whole.choices[0].message
            self.assertEqual(message.role, "assistant")
            self.assertGreater(len(message.content), 0)
            chunks = list(chat(stream=True, stream_options={"include_usage": True}, **fields))
            self.assertEqual("".join(c.delta.content or "" for chunk in chunks for c in chunk.choices), message.content)
            self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
            self.assertEqual(chunks[-1].choices, [])
            self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
            self.assertEqual(len({chunk.id for chunk in chunks}), 1)

    def test_seed_repeats(self):
        texts = [chat(temperature=1, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_stop_string(self):
        text = chat().choices[0].message.content
        middle = len(text) // 2
        stop = text[middle : middle + 5]
        for choice in (chat(stop=stop).choices[0], chat(stop=["@@", stop]).choices[0]):
            self.assertEqual(choice.message.content, text[: text.index(stop)])
            self.assertEqual(choice.finish_reason, "stop")
        streamed = "".join(c.delta.content or "" for chunk in chat(stop=stop, stream=True) for c in chunk.choices)
        self.assertEqual(streamed, text[: text.index(stop)])

    def test_n_choices(self):
        answer = chat(n=3, temperature=1, seed=3)
        self.assertEqual(sorted(c.index for c in answer.choices), [0, 1, 2])
        texts = [c.message.content for c in sorted(answer.choices, key=lambda c: c.index)]
        self.assertEqual(len(set(texts)), 3)
        again = chat(n=3, temperature=1, seed=3, stream=True)
        streamed = ["", "", ""]
        for chunk in again:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        self.assertEqual(streamed, texts)

    def test_logprobs(self):
        choice = chat(logprobs=True, top_logprobs=3).choices[0]
        entries = choice.logprobs.content
        self.assertEqual(bytes(b for e in entries for b in e.bytes).decode(), choice.message.content)
        for entry in entries:
            self.assertEqual(len(entry.top_logprobs), 3)
            self.assertEqual(entry.logprob, max(top.logprob for top in entry.top_logprobs))
            self.assertLessEqual(entry.logprob, 0)

    def test_content_parts_and_max_completion_tokens(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
        answer = client.chat.completions.create(model=model, messages=parts, max_completion_tokens=24, temperature=0)
        self.assertEqual(answer.choices[0].message.content, chat().choices[0].message.content)

    def test_conversation_is_found_again(self):
        messages = [{"role": "user", "content": "Tell me of the ball. " * 20}]
        first = chat(messages, max_tokens=64)
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
        second = chat(messages)
        cached = second.usage.prompt_tokens_details.cached_tokens
        self.assertGreaterEqual(cached, 64)
        self.assertLess(cached, second.usage.prompt_tokens)
        self.assertEqual(second.timings["cached_tokens"], cached)

    def test_schema(self):
        class Guest(BaseModel):
            name: Annotated[str, Field(max_length=24)]
            age: Annotated[int, Field(ge=0, le=120)]

        answer = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Guest, temperature=0, max_tokens=300)
        choice = answer.choices[0]
        self.assertEqual(choice.finish_reason, "stop", choice.message.content)
        self.assertEqual(json.loads(choice.message.content).keys(), {"name", "age"})


class Together(unittest.TestCase):
    def test_requests_at_once_give_the_texts_they_give_alone(self):
        def fields(seed):
            messages = [{"role": "user", "content": f"{'Speak. ' * (seed * 5)}Who is guest {seed}?"}]
            return {"model": model, "messages": messages, "max_tokens": 40, "temperature": 1, "seed": seed}

        alone = [client.chat.completions.create(**fields(seed)).choices[0].message.content for seed in range(12)]

        async def crowd():
            async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=5) as many:
                return await asyncio.gather(*(many.chat.completions.create(**fields(seed)) for seed in range(12)))

        together = [answer.choices[0].message.content for answer in asyncio.run(crowd())]
        self.assertEqual(together, alone)

    def test_closed_stream_ends_the_request(self):
        before = complete().choices[0].text
        with complete(stream=True, max_tokens=900) as stream:
            next(iter(stream))
        for _ in range(300):
            if metric("colibri_requests_running") == 0:
                break
            time.sleep(0.1)
        self.assertEqual(metric("colibri_requests_running"), 0)
        self.assertEqual(complete().choices[0].text, before)


class Errors(unittest.TestCase):
    def refused(self, field, call, **fields):
        with self.assertRaises(openai.BadRequestError) as caught:
            call(**fields)
        self.assertIn(field, caught.exception.message)

    def test_bad_fields_are_named(self):
        for field, value in {
            "temperature": -1,
            "top_p": 2,
            "max_tokens": -3,
            "n": 0,
            "presence_penalty": 9,
            "logit_bias": {"x": 1},
            "stop": 5,
            "seed": "x",
        }.items():
            with self.subTest(field):
                self.refused(field, chat, **{field: value})
                self.refused(field, complete, **{field: value})

    def test_bad_messages_and_prompts_are_named(self):
        self.refused("messages", chat, messages=[])
        self.refused("messages", chat, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])
        self.refused("prompt", complete, prompt=[99999999])

    def test_context_that_cannot_fit(self):
        self.refused("1024", chat, messages=[{"role": "user", "content": "word " * 4000}])

    def test_unknown_path(self):
        with self.assertRaises(openai.NotFoundError):
            client.embeddings.create(model=model, input="text")

    def test_key(self):
        for key in ("wrong", f"{KEY}x", KEY[:-1]):
            with self.assertRaises(openai.AuthenticationError):
                openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key=key, max_retries=0).models.list()
        right = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key=KEY, max_retries=0)
        answer = right.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
        self.assertEqual(answer.choices[0].message.content, chat().choices[0].message.content)


if __name__ == "__main__":
    unittest.main()
