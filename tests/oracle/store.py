"""Writing a checkpoint: shards, their index, and config files."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_shard(path: Path, tensors: dict, stamps: dict | None = None) -> None:
    """Writes one file, with its tensors' format names if given. The library leaves it readable to its owner alone."""
    own = {name: format for name, format in (stamps or {}).items() if name in tensors}
    metadata = {"format": "pt"} | ({"colibri.fmt": json.dumps(own)} if own else {})
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)


def deal(tensors: dict, count: int, scatter: bool) -> list[dict]:
    """Deals tensors out to `count` shards: round-robin, or in order by size as published checkpoints are."""
    shards = [{} for _ in range(count)]
    total, before = sum(t.nbytes for t in tensors.values()), 0
    for i, (name, tensor) in enumerate(tensors.items()):
        at = i % count if scatter else min(before * count // total, count - 1)
        shards[at][name] = tensor
        before += tensor.nbytes
    return shards


def write_weights(out: Path, tensors: dict, spec, stamps: dict | None = None) -> None:
    """Writes the shards. As on a hub, several shards in one directory come with an index file."""
    shards = deal(tensors, spec.shards, spec.scatter)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors" if spec.shards == 1 else f"model-{i + 1:05}-of-{spec.shards:05}.safetensors"
        folder = out / spec.dirs[i % len(spec.dirs)]
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(folder / name, shard, stamps)
        weight_map.update(dict.fromkeys(shard, name))
    if spec.shards > 1 and len(spec.dirs) == 1:
        size = sum(t.nbytes for t in tensors.values())
        write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def assemble(out: Path, spec, config: dict, into: Path) -> None:
    """Gathers a fixture's shards into one directory that the library can load, under `config`."""
    weight_map = {}
    for folder in spec.dirs:
        for shard in sorted((out / folder).glob("*.safetensors")):
            (into / shard.name).symlink_to(shard.resolve())
            header = json.loads(shard.read_bytes()[8:][: int.from_bytes(shard.read_bytes()[:8], "little")])
            weight_map.update({name: shard.name for name in header if name != "__metadata__"})
    write_json(into / INDEX, {"metadata": {}, "weight_map": weight_map})
    write_json(into / "config.json", config)


def replace(made: Path, out: Path) -> None:
    """Puts a finished fixture at `out`, in place of an older one there; anything else there is left alone."""
    if (out / "expected.json").exists():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} exists and is not a fixture")
    shutil.copytree(made, out, dirs_exist_ok=True)


def write_expected(path: Path, expected: dict) -> None:
    """One key a line, long lists on one line each: readable, and small in a diff."""
    def lines(value, indent):
        if not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        pad = " " * (indent + 1)
        body = ",\n".join(f"{pad}{json.dumps(k)}: {lines(v, indent + 1)}" for k, v in value.items())
        return "{\n" + body + "\n" + " " * indent + "}"

    path.write_text(lines(expected, 0) + "\n")
