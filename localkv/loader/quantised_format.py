"""The format of each tensor in a file that llama-quantize makes.

`tensor_format` says it for plans and random models: matrices in one type (`--pure` except for the
output matrix, which has at least Q6_K's bits), vectors, routers and other small tensors as they
are. `Mixture` says it exactly, for files that are made: types such as Q4_K_M keep some matrices in
more bits, by what they are for, their layer, and the model (`llama_tensor_get_type` and its like in
llama-quant.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from localkv.errors import UsageError, quoted
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS, QuantFormat

FLOAT_PARTS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    *(f"time_mix_{part}{i}.weight" for part in "wvag" for i in range(3)),
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
)
"""In names of tensors that llama-quantize leaves as they are."""
FLOAT_NAMES = ("position_embd.weight", "token_types.weight")


def tensor_format(
    name: str, shape: tuple[int, ...], type_name: str, *, is_output: bool
) -> QuantFormat:
    """The format of a tensor in a file whose type of weights is `type_name`."""
    if not is_quantised(name, shape):
        return FORMATS["f32"]
    return quantised_format(shape[-1], type_name, is_output=is_output)


def bits(fmt: QuantFormat) -> float:
    """Bits per value, without a scale per row."""
    return 8 * fmt.block_bytes / fmt.block_size


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama-quantize changes a tensor's type."""
    return (
        len(trimmed(shape)) > 1
        and name.endswith("weight")
        and name not in FLOAT_NAMES
        and not any(part in name for part in FLOAT_PARTS)
    )


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading axes of length 1, which ggml doesn't count."""
    first = next((i for i, n in enumerate(shape[:-1]) if n != 1), len(shape) - 1)
    return shape[first:]


def quantised_format(n_in: int, type_name: str, *, is_output: bool) -> QuantFormat:
    """The format of a matrix with rows of `n_in` values in a file of the type `type_name`."""
    if is_output and bits(FORMATS[type_name]) < bits(FORMATS["q6_K"]):
        type_name = "q6_K"
    fmt = FORMATS[type_name]
    if n_in % fmt.block_size:
        fmt = FORMATS[fmt.narrow or "f16"]
    return FORMATS["f16"] if n_in % fmt.block_size else fmt


class FileType(NamedTuple):
    """A type of files.

    Attributes:
        number: in `general.file_type`.
        base: the name of the format that most matrices have.
    """

    number: int
    base: str


FILE_TYPES = {
    "Q1_0": FileType(40, "q1_0"),
    "Q2_0": FileType(41, "q2_0"),
    "Q4_0": FileType(2, "q4_0"),
    "Q4_1": FileType(3, "q4_1"),
    "MXFP4_MOE": FileType(38, "mxfp4"),
    "Q5_0": FileType(8, "q5_0"),
    "Q5_1": FileType(9, "q5_1"),
    "IQ2_XXS": FileType(19, "iq2_xxs"),
    "IQ2_XS": FileType(20, "iq2_xs"),
    "IQ2_S": FileType(28, "iq2_xs"),
    "IQ2_M": FileType(29, "iq2_s"),
    "IQ1_S": FileType(24, "iq1_s"),
    "IQ1_M": FileType(31, "iq1_m"),
    "TQ1_0": FileType(36, "tq1_0"),
    "TQ2_0": FileType(37, "tq2_0"),
    "Q2_K": FileType(10, "q2_K"),
    "Q2_K_S": FileType(21, "q2_K"),
    "IQ3_XXS": FileType(23, "iq3_xxs"),
    "IQ3_S": FileType(26, "iq3_s"),
    "IQ3_M": FileType(27, "iq3_s"),
    "IQ3_XS": FileType(22, "iq3_s"),
    "Q3_K_S": FileType(11, "q3_K"),
    "Q3_K_M": FileType(12, "q3_K"),
    "Q3_K_L": FileType(13, "q3_K"),
    "IQ4_NL": FileType(25, "iq4_nl"),
    "IQ4_XS": FileType(30, "iq4_xs"),
    "Q4_K_S": FileType(14, "q4_K"),
    "Q4_K_M": FileType(15, "q4_K"),
    "Q5_K_S": FileType(16, "q5_K"),
    "Q5_K_M": FileType(17, "q5_K"),
    "Q6_K": FileType(18, "q6_K"),
    "Q8_0": FileType(7, "q8_0"),
    "F16": FileType(1, "f16"),
    "BF16": FileType(32, "bf16"),
    "F32": FileType(0, "f32"),
}
"""llama-quantize's types, in its order (`QUANT_OPTIONS` in quantize.cpp)."""
FILE_TYPE_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
NEEDS_IMPORTANCE = ("iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s")
"""Types of matrices that are no use without an importance matrix."""

_LARGE_IN_80_LAYERS = {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
"""Architectures and their layers of which llama.cpp says "70B"."""


def file_type_name(text: str) -> str | None:
    """The name of a type of files that a user writes by name or number; None if there is none."""
    name = FILE_TYPE_ALIASES.get(text.upper(), text.upper())
    if name in FILE_TYPES:
        return name
    numbers = {str(kind.number): key for key, kind in FILE_TYPES.items()}
    return numbers.get(text)


def tensor_type(text: str) -> QuantFormat | None:
    """A type of weights that a user names; None if there is none."""
    return next((x for x in WEIGHT_FORMATS.values() if x.name.lower() == text.lower()), None)


@dataclass(frozen=True)
class ModelFacts:
    """What of a model the types of its tensors depend on.

    Attributes:
        architecture: `general.architecture`.
        n_layers, n_experts: in all.
        n_head, n_head_kv: the first layer's.
    """

    architecture: str
    n_layers: int
    n_experts: int
    n_head: int
    n_head_kv: int

    @property
    def heads_per_kv_head(self) -> int:
        return self.n_head // self.n_head_kv if self.n_head_kv else 0

    @property
    def is_large(self) -> bool:
        """Whether llama.cpp takes it for one of 70 billion weights, with few KV heads."""
        if self.architecture == "llama":
            return self.n_layers == 80 and self.n_head != self.n_head_kv
        return _LARGE_IN_80_LAYERS.get(self.architecture) == self.n_layers


@dataclass(frozen=True)
class TypeChoices:
    """What a user asks for.

    Attributes:
        file_type: a key of `FILE_TYPES`.
        pure: all matrices in its base type.
        leave_output: the output matrix stays as it is.
        output, token_embedding: their types, or None.
        patterns: regular expressions for names of tensors, and their types; the first one counts.
        has_importance: there is an importance matrix.
    """

    file_type: str
    pure: bool = False
    leave_output: bool = False
    output: QuantFormat | None = None
    token_embedding: QuantFormat | None = None
    patterns: Sequence[tuple[re.Pattern[str], QuantFormat]] = ()
    has_importance: bool = False


_CATEGORIES = {
    "attn_qkv.weight": "qkv",
    "attn_kv_b.weight": "kv_b",
    "attn_v.weight": "v",
    "attn_k.weight": "k",
    "attn_q.weight": "q",
    "attn_output.weight": "attn_output",
    "ffn_up": "up",
    "ffn_gate": "gate",
    "ffn_down": "down",
}
TOKEN_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"
_LIKE_V = ("v", "qkv", "kv_b")
_TWO_BITS = ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M")
_SMALL = (*_TWO_BITS, "IQ2_S", "IQ2_M")
_THREE_BITS = ("IQ2_S", "IQ2_M")


def category(name: str) -> str:
    """What a tensor is for."""
    if name == OUTPUT:
        return "output"
    if name in TOKEN_EMBEDDINGS:
        return "token_embd"
    return next((kind for part, kind in _CATEGORIES.items() if part in name), "")


def _more_bits(layer: int, n_layers: int) -> bool:
    """The first and the last eighth of the layers, and every third one between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


@dataclass
class Mixture:
    """Says the format of one tensor after the other, in the order in which they are written.

    Args:
        facts: of the model.
        choices: what is asked for.
        names: of all tensors.
    """

    facts: ModelFacts
    choices: TypeChoices
    names: Sequence[str]
    _seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n_like_v = sum(category(name) in _LIKE_V for name in self.names)
        self.is_tied = OUTPUT not in self.names

    def format_of(self, name: str, shape: tuple[int, ...], now: QuantFormat) -> QuantFormat:
        """The format that a tensor gets, which is the one it has where it is not to be changed.

        Raises:
            UsageError: its rows are no whole blocks, and there is no type to take instead.
        """
        choices, kind = self.choices, category(name)
        if not is_quantised(name, shape) or (choices.leave_output and kind == "output"):
            return now
        named = next((fmt for pattern, fmt in choices.patterns if pattern.search(name)), None)
        if choices.token_embedding is not None and kind == "token_embd":
            if name == TOKEN_EMBEDDINGS[0] or named is None:
                return self._fitting(name, shape, choices.token_embedding, exact=True)
        elif choices.output is not None and kind == "output":
            return self._fitting(name, shape, choices.output, exact=True)
        base = FORMATS[FILE_TYPES[choices.file_type].base]
        if base.block_size == 1:
            return base
        if named is not None:
            base = named
        elif not choices.pure:
            base = FORMATS[self._mixed(name, shape, kind, base)]
        return self._fitting(name, shape, base)

    def _fitting(
        self, name: str, shape: tuple[int, ...], fmt: QuantFormat, *, exact: bool = False
    ) -> QuantFormat:
        n_in = shape[-1]
        if n_in % fmt.block_size == 0:
            return fmt
        if exact or (fmt.block_size > 32 and not fmt.narrow):
            raise UsageError(
                f"{fmt.name} has blocks of {fmt.block_size} values, "
                f"and rows of tensor {quoted(name)} have {n_in}",
                hint=f"--tensor-type '{re.escape(name)}=q8_0' takes another type for it",
            )
        return quantised_format(n_in, fmt.name, is_output=False)

    def _count(self, kind: str) -> int:
        """How many tensors of a kind came before."""
        n = self._seen.get(kind, 0)
        self._seen[kind] = n + 1
        return n

    def _layer(self, name: str, n_before: int) -> int:
        """The layer of a tensor; of a model without experts, how many of its kind came before."""
        if self.facts.n_experts <= 1:
            return n_before
        found = re.match(r"blk\.(\d+)\.", name)
        if found is None or int(found[1]) >= self.facts.n_layers:
            raise UsageError(
                f"the layer of tensor {quoted(name)} is not one of {self.facts.n_layers}",
                hint="--pure gives all matrices one type",
            )
        return int(found[1])

    def _mixed(self, name: str, shape: tuple[int, ...], kind: str, base: QuantFormat) -> str:
        """The name of the type that a mixture takes for a tensor."""
        file_type, facts = self.choices.file_type, self.facts
        if kind == "output" or (self.is_tied and kind == "token_embd"):
            return self._output_type(shape, base)
        if file_type == "MXFP4_MOE":
            is_expert = facts.architecture != "bailingmoe3" or kind in ("up", "gate", "down")
            return "mxfp4" if len(trimmed(shape)) > 2 and is_expert else "q8_0"
        if kind == "token_embd":
            return self._embedding_type(base)
        if file_type in _SMALL:
            return self._small_type(kind, base)
        if kind in _LIKE_V:
            return self._value_type(base)
        if kind in ("k", "q"):
            return self._key_type(kind, base)
        if kind == "down":
            return self._down_type(name, base)
        if kind == "attn_output":
            return self._attention_output_type(base)
        if kind in ("gate", "up") and file_type == "IQ3_XS":
            layer, n = self._layer(name, self._count(kind)), facts.n_layers
            return "iq3_xxs" if n // 8 <= layer < 7 * n // 8 else base.name
        return base.name

    def _output_type(self, shape: tuple[int, ...], base: QuantFormat) -> str:
        file_type = self.choices.file_type
        if self.choices.output is not None:
            return self.choices.output.name
        if file_type == "MXFP4_MOE" or self.facts.architecture == "falcon":
            return "q8_0"
        if shape[-1] % base.block_size:
            return "q8_0"
        if file_type in (*_SMALL, "IQ3_XXS"):
            return "q5_K"
        return base.name if base.name == "q8_0" else "q6_K"

    def _embedding_type(self, base: QuantFormat) -> str:
        file_type = self.choices.file_type
        if file_type in _TWO_BITS:
            return "q2_K"
        if file_type in (*_THREE_BITS, "IQ3_XXS"):
            return "iq3_s"
        return "q4_K" if file_type in ("TQ1_0", "TQ2_0", "Q2_0") else base.name

    def _small_type(self, kind: str, base: QuantFormat) -> str:
        """In files of one or two bits."""
        facts = self.facts
        more = "iq3_s" if self.choices.file_type in _THREE_BITS else "q2_K"
        if kind in _LIKE_V:
            return "q4_K" if facts.heads_per_kv_head >= 4 or facts.n_experts >= 4 else more
        if facts.n_experts == 8 and kind == "k":
            return "q4_K"
        if kind == "down" and self._count("down") < facts.n_layers // 8:
            return more
        if kind == "attn_output":
            if facts.n_experts == 8:
                return "q5_K"
            if self.choices.file_type in ("IQ1_S", "IQ1_M"):
                return "iq2_xxs"
            if self.choices.file_type in _THREE_BITS:
                return "iq3_s"
        return base.name

    def _value_type(self, base: QuantFormat) -> str:
        file_type, facts = self.choices.file_type, self.facts
        n_before, few_heads = self._count("v"), facts.heads_per_kv_head >= 4
        chosen = base.name
        if file_type == "Q2_K":
            chosen = "q4_K" if few_heads else "q3_K"
        elif file_type == "IQ3_XXS" and not few_heads:
            chosen = "iq3_xxs" if self.choices.has_importance else "iq3_s"
        elif (
            file_type in ("Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S") and few_heads
        ) or file_type == "IQ3_M":
            chosen = "q4_K"
        elif file_type == "Q3_K_M":
            chosen = "q5_K" if n_before < 2 else "q4_K"
        elif file_type == "Q3_K_L" or (file_type in ("IQ4_NL", "IQ4_XS") and few_heads):
            chosen = "q5_K"
        elif file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(n_before, self.n_like_v):
            chosen = "q6_K"
        elif file_type == "Q4_K_S" and n_before < 4:
            chosen = "q5_K"
        if facts.is_large and chosen in ("q3_K", "q4_K"):
            chosen = "q5_K"
        return "q8_0" if facts.n_experts == 8 else chosen

    def _key_type(self, kind: str, base: QuantFormat) -> str:
        if kind == "k" and self.facts.n_experts == 8:
            return "q8_0"
        by_type: Mapping[str, str] = {"IQ3_XS": "iq3_xxs", "IQ3_XXS": "iq2_s"}
        return by_type.get(self.choices.file_type, base.name)

    def _down_type(self, name: str, base: QuantFormat) -> str:
        file_type, facts = self.choices.file_type, self.facts
        layer, n = self._layer(name, self._count("down")), facts.n_layers
        is_falcon, has_importance = facts.architecture == "falcon", self.choices.has_importance
        is_early = layer < n // 8
        if file_type == "Q2_K":
            return "q3_K"
        if file_type == "Q2_K_S" and is_early:
            return "q4_K"
        if file_type == "IQ3_XXS" and not has_importance:
            return "q4_K" if is_early else "q3_K"
        if file_type == "Q3_K_M":
            if layer < n // 16:
                return "q5_K"
            return "q4_K" if not is_falcon or _more_bits(layer, n) else "q3_K"
        if file_type == "IQ3_M" and (is_early or (facts.n_experts == 8 and _more_bits(layer, n))):
            return "q4_K"
        if file_type == "Q3_K_L":
            return "q4_K" if is_falcon else "q5_K"
        if file_type == "Q4_K_M" and is_falcon:
            return "q6_K" if layer < n // 16 else "q5_K" if _more_bits(layer, n) else "q4_K"
        if file_type in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, n):
            return "q6_K"
        if file_type in ("IQ4_NL", "IQ4_XS") and is_early and not has_importance:
            return "q5_K"
        if file_type == "Q4_K_S" and is_early and not is_falcon:
            return "q5_K"
        if file_type in ("Q4_0", "Q5_0") and is_early and has_importance:
            return "q4_1" if file_type == "Q4_0" else "q5_1"
        return base.name

    def _attention_output_type(self, base: QuantFormat) -> str:
        file_type, facts = self.choices.file_type, self.facts
        if facts.architecture == "falcon":
            return "q4_K" if file_type == "Q3_K_L" else base.name
        if facts.n_experts == 8:
            small = "Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS"
            return "q5_K" if file_type in small.split() else base.name
        chosen = {
            "Q2_K": "q3_K",
            "IQ3_XXS": "iq3_s",
            "Q3_K_M": "q4_K",
            "Q3_K_L": "q5_K",
            "IQ3_M": "q4_K",
        }
        return chosen.get(file_type, base.name)


def write_order(names: Sequence[str]) -> list[str]:
    """Names of tensors in the order in which llama.cpp writes them: by layer, then by name."""

    def key(name: str) -> tuple[int, bytes]:
        found = re.match(r"blk\.(\d+)", name)
        return int(found[1]) if found else -1, name.encode()

    return sorted(names, key=key)
