"""A tokenizer for many scripts, and a chat template: for tests of text that is split over tokens, and of conversations.

The texts were written for this purpose, and the template too, in the manner of the architecture's own.
"""

import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from store import write_json

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
# A model writes these itself.
PLAIN = ["<think>", "</think>"]

CORPUS = """The little bird drinks from one flower and flies to the next one. Where did it go? It went to the garden.
Ein kleiner Vogel fliegt über den Gärten; er trinkt, während er in der Luft steht. Wohin fliegt er? Nach Süden.
Le petit oiseau boit sans se poser, puis il repart. Où va-t-il ? Il va là-bas, près de la forêt.
El pajarito bebe en el aire y mañana volverá. ¿Adónde va? ¡Qué rápido es!
小鸟在花园里喝水。小鸟飞到下一朵花。你好,你是谁?我是一只小鸟。今天天气很好,我们去花园看花。谢谢你,再见。
小さな鳥が庭で花の蜜を飲みます。鳥は次の花へ飛びます。こんにちは、あなたは誰ですか。今日はいい天気ですね。ありがとうございます。
작은 새가 정원에서 꽃의 꿀을 마십니다. 새는 다음 꽃으로 날아갑니다. 안녕하세요, 당신은 누구입니까? 감사합니다.
Маленькая птица пьёт нектар в саду и летит к следующему цветку. Здравствуйте, кто вы? Спасибо, до свидания.
الطائر الصغير يشرب من الزهرة ثم يطير إلى الزهرة التالية. مرحبا، من أنت؟ شكرا جزيلا.
छोटी चिड़िया फूल से रस पीती है और अगले फूल पर उड़ जाती है। नमस्ते, आप कौन हैं? धन्यवाद।
นกตัวเล็กดื่มน้ำหวานจากดอกไม้ แล้วบินไปยังดอกไม้ดอกต่อไป สวัสดี คุณคือใคร ขอบคุณ
🐦🌸 🙂 🙂🙂 🦜🌺 👍🏽 ❤️ 👩‍🌾 → ✓
"""

# None of these is in the corpus as it stands, so that most characters are in pieces.
TEXTS = [
    "Hello, world!",
    "蜂鳥是世界上最小的鳥,能倒著飛。",
    "ハチドリは後ろ向きに飛べます。漢字と仮名。",
    "벌새는 뒤로 날 수 있어요.",
    "Колибри умеет летать назад — единственная из птиц.",
    "الطائر الطنان يطير إلى الوراء.",
    "गुंजन पक्षी पीछे की ओर उड़ सकता है।",
    "นกฮัมมิงเบิร์ดบินถอยหลังได้",
    "🦩🪶👩‍👩‍👧‍👦🏳️‍🌈🇧🇷 e\u0301 👍🏿!",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 and 𓅃 and \u00a0 spaces\t\n",
    "mixed: 你好 bird 🐦, Ünïcödé → ✓ \ufffd end",
]

CONVERSATIONS = [
    [{"role": "user", "content": "Who are you?"}],
    [{"role": "system", "content": "You are a small bird. 你是小鸟。"}, {"role": "user", "content": "Where did you go? 🐦"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>A greeting.</think>Hello, who are you?"},
        {"role": "user", "content": " A friend. \n"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "再见!"},
    ],
]


def write(out: Path, vocab: int) -> PreTrainedTokenizerFast:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(PLAIN), special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    if tokenizer.get_vocab_size() != vocab:
        raise RuntimeError(f"the text is too short for {vocab} entries")
    tokenizer.save(str(out / "tokenizer.json"))
    template = Path(__file__).parent / "chat_template.jinja"
    shutil.copy(template, out / "chat_template.jinja")
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[0],
        "model_max_length": 4096, "clean_up_tokenization_spaces": False,
    })
    return PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"), chat_template=template.read_text())


def record(tokenizer: PreTrainedTokenizerFast) -> dict:
    """What the library makes of conversations and texts."""

    def rendered(messages, **variables):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        return {"messages": messages, "variables": variables, "text": text, "ids": encode(text)}

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return {
        "conversations": [rendered(m) for m in CONVERSATIONS] + [rendered(CONVERSATIONS[1], enable_thinking=False)],
        "texts": [{"text": text, "ids": encode(text)} for text in TEXTS],
    }
