"""A small byte-level BPE tokenizer, trained on the text below (written for this purpose)."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from store import write_json

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>"]

CORPUS = """The hummingbird is the smallest of birds and the only one that can fly backwards.
It drinks while it hovers, and its wings beat about fifty times in a second.
A flower opens in the morning; the bird comes, takes a little, and goes on to the next flower.
It cannot carry the whole garden with it. It visits what it needs, when it needs it, and no more.
At night it sleeps so deeply that its heart slows down, and in the morning it has to warm up again.
A large model is a garden of experts. For every token the router picks a few of them, and the rest stay on the disk.
While one layer is computed, the experts of the next layer are read, so that the reading hides behind the arithmetic.
The cache keeps what was used last, because what was used last is often what is used next.
If two disks hold the same files, each of them reads a part, and the faster disk reads the larger part.
Numbers do not depend on where they come from: the same weights and the same tokens give the same answer.
One, two, three, four, five, six, seven, eight, nine, ten. 0123456789 + 42 = 123456831?
"Who is there?" asked the old gardener. "Only a bird," said the child, "and it is already gone."
Über den Gärten fliegt ein kleiner Vogel. Le colibri boit sans se poser. El colibrí vuela hacia atrás. 蜂鸟很小。
def read(offset, length): return file[offset : offset + length]
"""


def train(vocab: int) -> Tokenizer:
    """Trains the tokenizer: all 256 bytes, so any text can be encoded, and merges up to `vocab` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise RuntimeError(f"the text is too short for {vocab} entries")
    return tokenizer


def write(out: Path, vocab: int) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = train(vocab)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    })
    return tokenizer
