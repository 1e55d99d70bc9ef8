"""The anthropic package of Python against the server."""

import json
import os
import unittest

import anthropic
import openai

URL = os.environ["SERVER_URL"]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "Tell me of the ball."}]


# The package has no temperature; the API has.
GREEDY = {"temperature": 0}


def message(**fields):
    body = GREEDY | fields.pop("extra_body", {})
    return client.messages.create(**{"model": "demo", "messages": MESSAGES, "max_tokens": 24} | fields, extra_body=body)


class Messages(unittest.TestCase):
    def test_answer_is_that_of_chat_completions(self):
        answer = message()
        chat = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=24, temperature=0
        )
        self.assertEqual(answer.content[0].text, chat.choices[0].message.content)
        self.assertEqual(answer.stop_reason, "max_tokens")
        tokens = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        self.assertEqual((tokens, answer.usage.output_tokens), (chat.usage.prompt_tokens, chat.usage.completion_tokens))
        self.assertEqual(client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens, tokens)

    def test_stream(self):
        whole = message(max_tokens=60)
        with client.messages.stream(model="demo", messages=MESSAGES, max_tokens=60, extra_body=GREEDY) as stream:
            texts = list(stream.text_stream)
            final = stream.get_final_message()
        self.assertGreater(len(texts), 10)
        self.assertEqual("".join(texts), whole.content[0].text)
        self.assertEqual((final.content[0].text, final.stop_reason), (whole.content[0].text, whole.stop_reason))
        self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)

    def test_stop_sequence(self):
        word = message(max_tokens=60).content[0].text.split()[5]
        answer = message(max_tokens=60, stop_sequences=[word])
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ("stop_sequence", word))
        self.assertNotIn(word, answer.content[0].text)

    def test_schema(self):
        schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}, "required": ["age"], "additionalProperties": False}
        answer = message(max_tokens=200, output_config={"format": {"type": "json_schema", "schema": schema}})
        self.assertEqual(json.loads(answer.content[0].text).keys(), {"age"})

    def test_errors(self):
        for field, value in {"temperature": -1, "top_k": "x"}.items():
            with self.subTest(field), self.assertRaises(anthropic.BadRequestError) as caught:
                message(extra_body={field: value})
            self.assertIn(field, caught.exception.message)
            self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")


if __name__ == "__main__":
    unittest.main()
