"""Runs lm-eval on tasks with known scores: the model's greedy answers, one of four labels wrong on purpose."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import openai

URL = os.environ["SERVER_URL"]
PROGRAM = os.environ["PROGRAM"]
MODEL_DIR = os.environ["MODEL_DIR"]

PROMPTS = ["It is a truth universally acknowledged, that", "Mr. Darcy soon drew", "She could not help", "The evening was spent"]
TOKENS = 12

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id


def greedy(prompt):
    run = subprocess.run([PROGRAM, "decode", "--prompt", prompt, "-n", str(TOKENS), "--json", "--no-usage"], check=True, capture_output=True)
    return json.loads(run.stdout)["text"]


def chat(prompt):
    messages = [{"role": "user", "content": prompt}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=TOKENS, temperature=0)
    return answer.choices[0].message.content


def write_task(directory, name, documents, **fields):
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        **fields,
    }
    (directory / f"{name}.yaml").write_text(json.dumps(task))  # YAML contains JSON.


def generation(directory, name, answers):
    wrong_last = [*answers[:-1], answers[-1] + "?"]
    write_task(
        directory,
        name,
        [{"prompt": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, wrong_last, strict=True)],
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["@@@"], "max_gen_toks": TOKENS, "temperature": 0},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )


class LmEval(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = pathlib.Path(temporary.name)

    def score(self, kind, endpoint, name, *flags):
        arguments = f"model={model},base_url={URL}/v1/{endpoint},num_concurrent=2,max_retries=1"
        if kind == "local-completions":
            arguments += f",tokenizer_backend=huggingface,tokenizer={MODEL_DIR}"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks", name]
        command += ["--include_path", str(self.directory), "--output_path", str(self.directory / "out"), *flags]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.directory / "cache"), "OPENAI_API_KEY": "none"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr[-4000:])
        [results] = (self.directory / "out").rglob("results_*.json")
        return json.loads(results.read_text())["results"][name]

    def test_multiple_choice(self):
        documents = []
        for prompt in PROMPTS:
            documents.append({"prompt": prompt, "choices": [" xylophone quantum zebra", greedy(prompt)], "label": 1})
        documents[-1]["label"] = 0
        write_task(
            self.directory,
            "demo_choice",
            documents,
            output_type="multiple_choice",
            doc_to_choice="{{choices}}",
            doc_to_target="{{label}}",
            target_delimiter="",
            metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        )
        self.assertEqual(self.score("local-completions", "completions", "demo_choice")["acc,none"], 0.75)

    def test_generation(self):
        generation(self.directory, "demo_text", [greedy(prompt) for prompt in PROMPTS])
        self.assertEqual(self.score("local-completions", "completions", "demo_text")["exact_match,none"], 0.75)

    def test_chat(self):
        generation(self.directory, "demo_chat", [chat(prompt) for prompt in PROMPTS])
        found = self.score("local-chat-completions", "chat/completions", "demo_chat", "--apply_chat_template")
        self.assertEqual(found["exact_match,none"], 0.75)


if __name__ == "__main__":
    unittest.main()
