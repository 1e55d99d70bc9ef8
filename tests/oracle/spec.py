"""What a fixture is: the model's config.json, how its weights are stored, and what is asked of it."""

from dataclasses import dataclass, field

from families import FAMILIES, Family, of


@dataclass
class Spec:
    """One fixture directory.

    config: config.json, exactly as written (keys may be missing on purpose).
    dtype: stored dtype of the weights ("bf16", "f16", "f32"); the router's correction bias is always F32.
    dtype_of: (regular expression, dtype) pairs that override `dtype`; the first that matches a tensor name wins.
    packed: (regular expression, format) pairs: matrices whose name the first matching one finds are stored in that format of
        quantise.py (None: as floats). stamp: whether the shards name the formats in their metadata.
    layout: "per-expert" (what published checkpoints hold) or "fused" (what a state_dict holds).
    dirs: sub-directories that the shards are dealt out to; [""] is the fixture's own directory.
    shards: number of files. scatter: deal tensors out round-robin (an expert straddles files), else in order.
    prompt: number of prompt ids, a text, or "chat": the second conversation of chat.py, by its template. new: tokens to generate. score: number of random ids to score (0: prompt and
        continuation).
    eos_at: index of the generated token that is declared a stop token ("eos_in" says where), so that generation ends there.
    eos_in: "config", "list" (config.json, one of a list) or "generation" (generation_config.json alone).
    indexer: whether indexer tensors are stored. Without them the reference is the same model with dense attention.
    mtp: whether an MTP layer is stored at index num_hidden_layers. mtp_indexer: whether it has an indexer, if the others have.
    mtp_agrees: for a constructed model in which a token mostly depends on the one before it alone, and whose MTP layer knows that: the least
        and the largest share of first drafts that come true.
    """

    name: str
    config: dict
    dtype: str = "bf16"
    dtype_of: list = field(default_factory=list)
    packed: list = field(default_factory=list)
    stamp: bool = False
    layout: str = "per-expert"
    dirs: list = field(default_factory=lambda: [""])
    shards: int = 1
    scatter: bool = False
    prompt: int | str = 12
    new: int = 20
    score: int = 40
    eos_at: int | None = None
    eos_in: str = "config"
    generation_config: dict | None = None
    indexer: bool = True
    mtp: bool = False
    mtp_indexer: bool = True
    mtp_agrees: tuple[float, float] | None = None

    @property
    def family(self) -> Family:
        return of(self.config)

    @property
    def text(self) -> dict:
        """The keys of the language model."""
        return self.config.get("text_config", self.config)

    @property
    def indexed(self) -> bool:
        """Whether the architecture has indexers, stored or not."""
        return "index_topk" in self.family.base


def config(model_type: str = "glm_moe_dsa", **changes) -> dict:
    """A small config.json of a family; `changes` of the language model's keys override it, and None removes a key."""
    base = FAMILIES[model_type].base
    text = {k: v for k, v in (base.get("text_config", base) | changes).items() if v is not None}
    return base | {"text_config": text} if "text_config" in base else text
