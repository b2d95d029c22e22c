"""Facts about a model and a cache, as frozen dataclasses.

Nothing here computes, and nothing here imports torch: these are the values that the loader fills
in, that the user chooses, and that every layer above passes down unchanged.

A preset is nothing but the two flags that it stands for, so that nobody has to know all names to
begin. The pairs follow from figures: each is on the frontier of docs/cache-costs.md. There no other
pair of as few bits after 16,384 tokens has a smaller divergence on the worst of three models (the
model that ships, and its twins with outliers in K). "speed" is on the frontier of the pairs without
a tail, which are read fastest. K has at least as many bits as V, since an error of K moves the
softmax's weights and an error of V only the values that are averaged. Types by channel keep the
newest 64 tokens in f16 as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from localkv.errors import UsageError
from localkv.option_checks import unknown_name

DEVICES = ("auto", "cuda", "cpu", "reference")
"""Names of devices; "auto" is "cuda" if that can be used, else "cpu"."""


def device_name(text: str) -> str:
    """A device as placements name it: "cuda0" of CUDA0 and cuda:0, "cpu" of CPU."""
    return text.strip().lower().replace(":", "")


FIT = ("on", "off")
"""Values of `--fit`: "on" refuses a model that does not fit in memory."""

DEFAULT_CACHE_DISK = 8 << 30
"""Bytes of texts that are kept on a disk, where nobody says how many."""

ACTIVATIONS = ("auto", "exact")
"""Values of `--activations`; "exact" has products of float32 with float32."""

KV_ROTATIONS = ("auto", "on", "off")
"""Values of `CacheConfig.kv_rotation`."""

MIXED = "mixed"
"""In the place of a type where layers have different ones."""

MOST_EXACT = 1 << 20
"""The most tokens of `CacheConfig.kv_tail` and of `kv_sink`."""


ROPE_SCALINGS = ("none", "linear", "yarn")
"""Values of `--rope-scaling`."""


@dataclass(frozen=True)
class RopeOptions:
    """RoPE in place of what a model's file says; llama.cpp has options of these names.

    None leaves what the file says. So do 0 for a base, a scale or a context, and negative numbers
    for YaRN's factors and betas: they are llama.cpp's defaults.

    Attributes:
        rope_scaling: "none", "linear" or "yarn".
        rope_scale: how many times the trained context the scaled one is.
        rope_freq_base: base of the frequencies.
        rope_freq_scale: 1 / `rope_scale`.
        yarn_orig_ctx: tokens of context before scaling.
        yarn_ext_factor: how much frequencies that turn often are kept; 0 scales all alike.
        yarn_attn_factor: factor on cos and sin where `yarn_ext_factor` is 0.
        yarn_beta_slow, yarn_beta_fast: turns within the original context below which a frequency
            is scaled, and above which it is kept.
    """

    rope_scaling: str | None = None
    rope_scale: float | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn_orig_ctx: int | None = None
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_slow: float | None = None
    yarn_beta_fast: float | None = None

    def __post_init__(self) -> None:
        if self.rope_scaling is not None and self.rope_scaling not in ROPE_SCALINGS:
            raise unknown_name("unknown RoPE scaling", self.rope_scaling, ROPE_SCALINGS)
        if self.rope_scale and self.rope_freq_scale:
            raise UsageError(
                "--rope-scale and --rope-freq-scale both scale positions",
                hint="leave out one of them; --rope-scale N is --rope-freq-scale 1/N",
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RopeOptions:
        """The arguments of `LLM` that are options of RoPE."""
        return cls(**{one.name: arguments.get(one.name) for one in fields(cls)})

    @property
    def keys(self) -> dict[str, tuple[str, Any]]:
        """What replaces a file's keys: the option and the value, by the part of the key after the
        architecture's name."""
        found: dict[str, tuple[str, Any]] = {}
        for key, name in _ROPE_KEYS.items():
            value = getattr(self, name)
            is_set = value is not None and (not key.startswith(_YARN) or not value < 0)
            if is_set and (value or key.startswith(_YARN)):
                found[key] = name, value
        if self.rope_freq_scale:
            found["rope.scaling.factor"] = "rope_freq_scale", 1 / self.rope_freq_scale
        if "rope.freq_base" in found:  # Hunyuan's files give a factor on the base
            found["rope.scaling.alpha"] = "rope_freq_base", 0.0
        return found


PRE = "tokenizer.ggml.pre"
"""The key of a file's pre-tokenizer."""
LONGEST_KEY = 127
"""Bytes of a key that `--override-kv` may name, as in llama.cpp."""


@dataclass(frozen=True)
class Overrides:
    """What options put in the place of what a model's file says, before anything reads it.

    Attributes:
        kv: values by key, as `--override-kv` gives them; integers of 64 bits.
        rope: RoPE, after `kv`.

    Raises:
        UsageError: a key is too long, or a value is of no such type.
    """

    kv: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    rope: RopeOptions = field(default_factory=RopeOptions)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Overrides:
        """The arguments of `LLM` that replace what a file says.

        Raises:
            UsageError: two of them name the pre-tokenizer.
        """
        kv, pre = dict(arguments.get("override_kv") or {}), arguments.get("override_pre")
        if pre is not None:
            if PRE in kv:
                raise UsageError(
                    f"--override-pre and --override-kv {PRE} are the same", hint="give one of them"
                )
            kv[PRE] = pre
        return cls(kv, RopeOptions.of(arguments))

    def __bool__(self) -> bool:
        return bool(self.kv or self.rope.keys)

    def __post_init__(self) -> None:
        for key, value in self.kv.items():
            if not isinstance(key, str) or not 0 < len(key.encode()) <= LONGEST_KEY:
                raise UsageError(f"override_kv: {key!r:.60} is no key of a file")
            if not isinstance(value, str | int | float):
                raise UsageError(
                    f"override_kv: {key} is {value!r:.60}",
                    hint="a value is a string, an integer, a float, or a boolean",
                )
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise UsageError(f"override_kv: {key} does not fit in 64 bits")


_YARN = "rope.scaling.yarn_"
_ROPE_KEYS = {
    "rope.scaling.type": "rope_scaling",
    "rope.scaling.factor": "rope_scale",
    "rope.freq_base": "rope_freq_base",
    "rope.scaling.original_context_length": "yarn_orig_ctx",
    **{
        f"{_YARN}{name}": f"yarn_{name}"
        for name in ("ext_factor", "attn_factor", "beta_slow", "beta_fast")
    },
}


@dataclass(frozen=True)
class KVScales:
    """How large K and V of a model get, by layer and KV head; `cache/profile.py` has the file.

    Attributes:
        architecture, name, n_layers, n_kv_heads, head_dim: the model's.
        rotation_k, rotation_v: channels that were rotated together, or 0 (see `SegmentSpec`).
        n_tokens: of the text that it was measured with.
        absmax_k, absmax_v: [n_layers][n_kv_heads], the largest magnitude in the rows as they are
            to be packed: K after RoPE, both after rotation.
        smoothing: which smoothing the weights had (`KVProfile.smoothing_name`).
    """

    architecture: str
    name: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    rotation_k: int
    rotation_v: int
    n_tokens: int
    absmax_k: tuple[tuple[float, ...], ...]
    absmax_v: tuple[tuple[float, ...], ...]
    smoothing: str = ""


@dataclass(frozen=True)
class KVCodebook:
    """The numbers that the codes of a layer's K or V stand for, in types with as many codes.

    Attributes:
        layer, side: the index of the layer; "k" or "v".
        numbers: 2^b integers, ascending (`shared/codebooks.py`).
    """

    layer: int
    side: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class CacheConfig:
    """The types and sizes of a KV cache.

    Attributes:
        type_k, type_v: names in `localkv.quant_formats.KV_FORMATS`, chosen separately.
        n_ctx: tokens that one sequence can hold.
        n_sequences: sequences that are held at the same time.
        n_tokens: tokens that these can hold together; None for `n_ctx` each.
        kv_rotation: whether K and V are stored rotated (`cache/repack.py`): "on", "off", or
            "auto", which rotates types that gain from it.
        kv_scales: the scales of types that are scaled by head.
        kv_codebooks: the codebooks of types that have some. Where one is missing, the codebook of
            normal numbers serves.
        ctx_checkpoints: copies of the states of recurrent layers that a sequence has at most, in
            the host's memory; 0 for none.
        checkpoint_min_step: tokens between two of these copies while a text goes on.
        kv_tail: newest tokens that are read as f16 (`cache/layout.py`); None for what types need.
        kv_sink: first tokens that are stored as f16; None for what the types gain from.
        smoothing: which smoothing the weights have (`KVProfile.smoothing_name`).
        type_k_swa, type_v_swa: types of layers with a window; None for `type_k` and `type_v`.
        swa_full: layers with a window keep all rows, not only those that later tokens see.
        type_k_rope: type of the rotated parts of keys in layers that keep latents
            (`LatentAttentionSpec`). The latents have `type_k`; they are V as well.
        kv_budget: most bytes of K and V together. As they fill up, pages change to the smaller
            types of `kv_ladder`. None for pages that keep their types.
        kv_ladder: pairs of types of K and V, from the first to the last (`cache/ladder.py`); the
            first is `type_k` and `type_v`. Empty without a budget.
        kv_window_bytes: bytes of `kv_budget` that layers with a window take. Their rows keep their
            types.
        layer_types: the types of K and of V in each layer of the model; None for a layer without
            rows. Layers that keep latents have the types of the latents and of the rotated parts of
            keys. If this is not empty, it replaces the types above.

    Raises:
        UsageError: `kv_rotation` is none of these, or a number of tokens or checkpoints makes no
            sense.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    n_ctx: int = 4096
    n_sequences: int = 1
    n_tokens: int | None = None
    kv_rotation: str = "auto"
    kv_scales: KVScales | None = None
    kv_codebooks: tuple[KVCodebook, ...] = ()
    type_k_swa: str | None = None
    type_v_swa: str | None = None
    swa_full: bool = False
    type_k_rope: str = "f16"
    ctx_checkpoints: int = 8
    checkpoint_min_step: int = 1024
    layer_types: tuple[tuple[str, str] | None, ...] = ()
    kv_tail: int | None = None
    kv_sink: int | None = None
    kv_budget: int | None = None
    kv_ladder: tuple[tuple[str, str], ...] = ()
    kv_window_bytes: int = 0
    smoothing: str = ""

    @property
    def ladder_bytes(self) -> int | None:
        """What the budget leaves to pages that change their types; None without one."""
        if self.kv_budget is None:
            return None
        return max(0, self.kv_budget - self.kv_window_bytes)

    def types_of(self, *, windowed: bool) -> tuple[str, str]:
        """Types of K and of V in layers with a window, or in those without."""
        if not windowed:
            return self.type_k, self.type_v
        return self.type_k_swa or self.type_k, self.type_v_swa or self.type_v

    @property
    def types(self) -> tuple[str, ...]:
        """All types that are asked for, K's first; each once."""
        if self.layer_types:
            return tuple(dict.fromkeys(name for side in (0, 1) for name in self._of_layers(side)))
        found = (*self.types_of(windowed=False), *self.types_of(windowed=True))
        return tuple(dict.fromkeys(found))

    @property
    def shown_types(self) -> tuple[str, str]:
        """The types of K and of V for people: "mixed" where layers have different ones."""
        if not self.layer_types:
            return self.type_k, self.type_v
        k, v = (list(dict.fromkeys(self._of_layers(side))) for side in (0, 1))
        return k[0] if len(k) == 1 else MIXED, v[0] if len(v) == 1 else MIXED

    @property
    def types_text(self) -> str:
        """The types in a word: "q8_0/q4_0", or all pairs that pages go through within a budget."""
        return ",".join("/".join(pair) for pair in self.kv_ladder or (self.shown_types,))

    def _of_layers(self, side: int) -> list[str]:
        return [pair[side] for pair in self.layer_types if pair is not None]

    def __post_init__(self) -> None:
        if self.ctx_checkpoints < 0 or self.checkpoint_min_step < 1:
            raise UsageError(
                f"{self.ctx_checkpoints} checkpoints, {self.checkpoint_min_step} tokens apart",
                hint="ctx_checkpoints is at least 0, checkpoint_min_step at least 1",
            )
        for name, number in (("kv_tail", self.kv_tail), ("kv_sink", self.kv_sink)):
            if number is not None and not 0 <= number <= MOST_EXACT:
                raise UsageError(f"{name} is {number}", hint=f"use 0 to {MOST_EXACT} tokens")
        if self.kv_rotation not in KV_ROTATIONS:
            raise unknown_name("unknown kv_rotation", self.kv_rotation, KV_ROTATIONS)


@dataclass(frozen=True)
class Preset:
    """A pair of cache types.

    Attributes:
        type_k, type_v: names in `KV_FORMATS`.
        reason: why this pair, in one line.
    """

    type_k: str
    type_v: str
    reason: str


PRESETS = {
    "quality": Preset(
        "f16",
        "f16",
        "nothing is packed; an f32 cache would move predictions as 8-bit activations do "
        "(KLD 2.4e-3 to 3.4e-3)",
    ),
    "balanced": Preset(
        "q8_0c",
        "q4_1",
        "43 % of f16's memory in a long context, and hardly more than 8-bit activations change "
        "(KLD 2.9e-3 to 4.0e-3)",
    ),
    "speed": Preset(
        "q8_0",
        "q4_0",
        "41 % of f16's memory, and as fast in a long context as 4 bits for both "
        "(KLD 7.3e-3 to 8.7e-3)",
    ),
    "compact": Preset(
        "q4_1c",
        "q4_0",
        "30 % of f16's memory in a long context, and diverges as little as speed "
        "(KLD 5.3e-3 to 8.3e-3)",
    ),
    "memory": Preset(
        "q4_1c128",
        "kv3_0",
        "25 % of f16's memory in a long context, and diverges a quarter more than speed "
        "(KLD 8.5e-3 to 1.1e-2)",
    ),
}
"""From the most bits to the fewest."""

USUAL_PAIRS = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
"""What is suggested where memory is short, from the most bits to the fewest. These pairs have no
tail, so they take the same for each token of a context, however short it is."""

SUGGESTED_PAIRS = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q5_0"),
    ("q8_0", "q4_0"),
    ("q6_0", "q4_0"),
    ("q4_0", "q4_0"),
)
"""The usual pairs, and pairs between them."""


def preset_pairs() -> tuple[tuple[str, str], ...]:
    """The presets' pairs, f16 left out."""
    pairs = [(preset.type_k, preset.type_v) for preset in PRESETS.values()]
    return tuple(pair for pair in pairs if pair != USUAL_PAIRS[0])
