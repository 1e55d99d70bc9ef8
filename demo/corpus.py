"""The corpus: Jane Austen's six novels, from a Debian package, as plain paragraphs.

    python corpus.py OUT

writes OUT/train.txt, OUT/held-out.txt (whole chapters that are never trained on) and OUT/tokenizer.json.
"""

import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 2048
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>"]
# Of each work, every 25th chapter is held out: about 4%.
EVERY = 25


def package(name: str, into: Path) -> Path:
    """Downloads and unpacks a Debian package, without installing it."""
    out = into / name
    if not out.exists():
        into.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", name], cwd=into, check=True, stderr=subprocess.DEVNULL)
        (deb,) = into.glob(f"{name}_*.deb")
        subprocess.run(["dpkg-deb", "-x", deb, out], check=True)
    return out


def r_strings(raw: bytes) -> list[str]:
    """The lines of a character vector, serialised by R (XDR, format 3)."""
    assert raw[:2] == b"X\n"
    at = 14 + 4 + struct.unpack_from(">I", raw, 14)[0]  # header, then the name of the encoding
    kind, length = struct.unpack_from(">II", raw, at)
    assert kind & 0xFF == 16, "not a character vector"
    at += 8
    lines = []
    for _ in range(length):
        kind, size = struct.unpack_from(">Ii", raw, at)
        assert kind & 0xFF == 9
        at += 8
        lines.append(raw[at : at + max(size, 0)].decode("utf-8"))
        at += max(size, 0)
    return lines


def austen(into: Path) -> dict[str, list[str]]:
    """Chapters of each novel."""
    data = (package("r-cran-janeaustenr", into) / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    works, at = {}, 0
    while at < len(data):
        size = struct.unpack_from(">I", data, at)[0]
        unzip = zlib.decompressobj()
        raw = unzip.decompress(data[at + 4 :])
        assert len(raw) == size
        at = len(data) - len(unzip.unused_data)
        lines = r_strings(raw)
        chapters, current = [], []
        for line in lines:
            if re.fullmatch(r"\s*chapter\s+([ivxlc]+|\d+)\.?\s*", line, re.IGNORECASE):
                chapters.append(current)
                current = []
            elif not re.fullmatch(r"\s*(volume\s+[ivx]+|the end|finis)\.?\s*", line, re.IGNORECASE):
                current.append(line)
        chapters.append(current)
        # What stands before the first chapter is the title page.
        works[lines[0].title()] = [paragraphs(chapter) for chapter in chapters[1:]]
    return works


def paragraphs(lines: list[str]) -> str:
    """Lines that were wrapped at 70 columns, joined; paragraphs are separated by a blank line."""
    text = "\n".join(line.strip() for line in lines)
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    text = "\n\n".join(part for part in parts if part)
    for plain, old in (("'", "‘’"), ('"', "“”")):
        text = re.sub(f"[{old}]", plain, text)
    return text.replace("_", "").replace("--", "—").replace("``", '"').replace("''", '"') + "\n\n"


def split(works: dict[str, list[str]]) -> tuple[str, str]:
    """Text to train on, and whole chapters held out. A chapter ends with the special token."""
    train, held = [], []
    for chapters in works.values():
        for i, chapter in enumerate(chapters):
            (held if i % EVERY == EVERY // 2 else train).append(chapter)
    return tuple(SPECIAL[0].join(part) for part in (train, held))


def tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE: every text can be encoded."""
    out = Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    out.train_from_iterator((line for line in text.replace(SPECIAL[0], "").splitlines(keepends=True)), trainer)
    assert out.get_vocab_size() == VOCAB
    return out


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    works = austen(out / "packages")
    train, held = split(works)
    for name, chapters in works.items():
        print(f"{name}: {len(chapters)} chapters, {sum(len(c.encode()) for c in chapters)} bytes")
    (out / "train.txt").write_text(train)
    (out / "held-out.txt").write_text(held)
    tok = tokenizer(train)
    tok.save(str(out / "tokenizer.json"))
    for name, text in (("train", train), ("held-out", held)):
        ids = tok.encode(text).ids
        print(f"{name}: {len(text.encode())} bytes, {len(ids)} tokens")


if __name__ == "__main__":
    main()
