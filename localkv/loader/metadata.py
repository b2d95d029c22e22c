"""Keys and values of a model file, with getters that check types and ranges.

A model file comes from the internet, and a number in it goes into products, powers and logarithms
that were written with real models in mind. So every number that is read has a range, far beyond any
real model's, and a number outside of it is refused before anything is computed with it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from localkv.config import Overrides, RopeOptions
from localkv.errors import LocalKVError, ModelFileError, UsageError, quoted
from localkv.loader.gguf_header import LazyArray, Strings

_INT31, _INT32 = (1 << 31) - 1, (1 << 32) - 1
_LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class Range:
    """From `least` to `most`, both included; `or_zero` where 0 stands for "none"."""

    least: float
    most: float
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is in the range. NaN is in none."""
        return self.least <= value <= self.most or (self.or_zero and value == 0)

    def __str__(self) -> str:
        span = f"{_shown(self.least)} to {_shown(self.most)}"
        return f"0 or {span}" if self.or_zero else span


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


_ANY = Range(-_LARGEST_FLOAT32, _LARGEST_FLOAT32)
"""The range of a key without one of its own: nothing is computed with its value."""

_COUNT = Range(1, 1 << 24)
_TOKENS = Range(1, _INT31)
_MAGNITUDE = Range(1e-3, 1e3)
_ROTATIONS = Range(1e-3, 1e5)

OF_MODELS = {
    "block_count": Range(1, 1 << 12),
    "context_length": _TOKENS,
    "embedding_length": _COUNT,
    "feed_forward_length": Range(1, 1 << 24, or_zero=True),
    "attention.head_count": Range(1, 1 << 16, or_zero=True),
    "attention.head_count_kv": Range(1, 1 << 16, or_zero=True),
    "attention.clamp_kqv": Range(0.0, 1e6),
    "attention.max_alibi_bias": Range(0.0, 1e6),
    "attention.key_length": Range(1, 1 << 16),
    "attention.value_length": Range(1, 1 << 16),
    "attention.key_length_swa": Range(1, 1 << 16),
    "attention.value_length_swa": Range(1, 1 << 16),
    "attention.shared_kv_layers": Range(0, 1 << 16),
    "embedding_length_per_layer_input": Range(0, 1 << 16),
    "activation_sparsity_scale": Range(-math.inf, 1e3),
    "altup.active_idx": Range(0, 15),
    "altup.num_inputs": Range(2, 16),
    "attention.key_length_mla": Range(1, 1 << 16),
    "attention.value_length_mla": Range(1, 1 << 16),
    "attention.kv_lora_rank": Range(1, 1 << 16),
    "attention.q_lora_rank": Range(1, 1 << 16),
    "attention.temperature_length": _TOKENS,
    "attention.layer_norm_rms_epsilon": Range(1e-20, 1.0),
    "attention.layer_norm_epsilon": Range(1e-20, 1.0),
    "attention.scale": Range(1e-6, 1e3, or_zero=True),
    "attention.output_scale": Range(1e-6, 1e6),
    "attn_logit_softcapping": Range(1e-3, 1e6, or_zero=True),
    "embedding_scale": Range(1e-6, 1e6, or_zero=True),
    "residual_scale": Range(1e-6, 1e6, or_zero=True),
    "nextn_predict_layers": Range(0, 1 << 16),
    "attention.value_scale": Range(1e-3, 1e3, or_zero=True),
    "swiglu_clamp_exp": Range(0.0, 1e6),
    "swiglu_clamp_shexp": Range(0.0, 1e6),
    "attention.sliding_window": Range(0, _INT31),
    "attention.sliding_window_pattern": Range(0, 1 << 16),
    "attention.temperature_scale": Range(-10.0, 10.0),
    "final_logit_softcapping": Range(1e-3, 1e6, or_zero=True),
    "logit_scale": Range(1e-6, 1e6),
    "full_attention_interval": Range(1, 1 << 16),
    "ssm.conv_kernel": Range(2, 64),
    "ssm.group_count": Range(1, 1 << 16),
    "ssm.inner_size": _COUNT,
    "ssm.state_size": Range(1, 1 << 16),
    "ssm.time_step_rank": Range(1, 1 << 16),
    "kda.head_dim": Range(1, 1 << 16),
    "kda.gate_lower_bound": Range(-1e3, -1e-3),
    "shortconv.l_cache": Range(2, 64),
    "classifier.pooling_type": Range(-1, 4),
    "decision.block_count": Range(0, 1 << 12),
    "moe_every_n_layers": Range(0, 1 << 12),
    "expert_count": Range(0, 1 << 16),
    "expert_used_count": Range(1, 1 << 16, or_zero=True),
    "expert_gating_func": Range(0, 255),
    "expert_group_count": Range(0, 1 << 16),
    "expert_group_used_count": Range(0, 1 << 16),
    "expert_shared_count": Range(0, 1 << 16),
    "expert_weights_scale": Range(1e-6, 1e6, or_zero=True),
    "leading_dense_block_count": Range(0, 1 << 16),
    "interleave_moe_layer_step": Range(1, 1 << 16),
    "moe_latent_size": Range(0, 1 << 24),
    "expert_feed_forward_length": Range(0, 1 << 24),
    "expert_shared_feed_forward_length": _COUNT,
    "rope.dimension_count": Range(2, 1 << 16),
    "rope.dimension_count_swa": Range(2, 1 << 16),
    "rope.dimension_sections": Range(0, 1 << 16),
    "rope.freq_base": Range(1.001, 1e15),
    "rope.freq_base_swa": Range(1.001, 1e15),
    "rope.scaling.alpha": Range(1e-3, 1e6, or_zero=True),
    "rope.scale_linear": Range(1e-3, 1e6, or_zero=True),
    "rope.scaling.factor": Range(1e-3, 1e6, or_zero=True),
    "rope.scaling.original_context_length": _TOKENS,
    "rope.scaling.attn_factor": _MAGNITUDE,
    "rope.scaling.yarn_attn_factor": _MAGNITUDE,
    "rope.scaling.yarn_ext_factor": Range(-1.0, 16.0),
    "rope.scaling.yarn_log_multiplier": Range(-10.0, 10.0),
    "rope.scaling.yarn_beta_fast": _ROTATIONS,
    "rope.scaling.yarn_beta_slow": _ROTATIONS,
}
"""By the part of a key after the architecture's name."""

OF_FILES = {
    "general.alignment": Range(0, _INT32),
    "general.file_type": Range(0, _INT32),
    "split.count": Range(0, 99_999),
    "split.no": Range(0, 99_998),
    "split.tensors.count": Range(0, 1 << 18),
    "tokenizer.ggml.precompiled_charsmap": Range(-128, 255),
    "tokenizer.ggml.scores": Range(-1e30, 1e30),
    "tokenizer.ggml.suppress_tokens": Range(-(1 << 31), _INT32),
    "tokenizer.ggml.token_type": Range(0, 255),
}
"""By key. Ids of special tokens are compared with the vocabulary instead."""

_TOKEN_ID = Range(-(1 << 31), _INT32)


def range_of(key: str) -> Range:
    """The range of the values of a key."""
    if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
        return _TOKEN_ID
    return OF_FILES.get(key) or OF_MODELS.get(key.partition(".")[2], _ANY)


def first_outside(key: str, values: list[float]) -> int | None:
    """Where the first value is that is out of the key's range; None if there is none."""
    allowed = range_of(key)
    # min and max may overlook NaN, a sum doesn't
    if not values or (
        allowed.holds(min(values)) and allowed.holds(max(values)) and not math.isnan(sum(values))
    ):
        return None
    return next(i for i, value in enumerate(values) if not allowed.holds(value))


class _Required(Enum):
    """The default of a getter that has none."""

    REQUIRED = "required"


_REQUIRED: Final = _Required.REQUIRED
_Default = TypeVar("_Default")
_NoDefault = Literal[_Required.REQUIRED]


class Metadata(Mapping[str, object]):
    """Keys and values of a header, as Python's str, int, float, bool and lists of those.

    Arrays are decoded on first use: a tokenizer's are most of a header, and few callers want them.

    The getters check the type, and numbers against the range of the key (`range_of`). They
    return `default` if the key is missing and raise `ModelFileError` if there is no default, or if
    the value is of another type or out of its range. An empty array is an array of any type.

    Args:
        values: the decoded values; a value may be an array that is still to be decoded.
        source: the file, for error messages.

    Attributes:
        before_rope: what there is without the options of RoPE, where those replaced keys; else
            None. It has the values of `--override-kv`.
        overridden: the keys that `--override-kv` named.
        unread: the keys that were not looked at yet.
    """

    before_rope: Metadata | None = None
    overridden: frozenset[str] = frozenset()
    _of_file: Metadata | None = None

    def __init__(self, values: Mapping[str, object], source: str = "metadata") -> None:
        self._values = dict(values)
        self._source = source
        self.unread = set[str]()

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        self.unread.discard(key)
        return value.decode() if isinstance(value, LazyArray) else value

    def __contains__(self, key: object) -> bool:
        self.unread.discard(cast(str, key))
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Metadata of {self._source}: {len(self)} keys>"

    def with_overrides(self, overrides: Overrides) -> Metadata:
        """The metadata with what options replace; itself if that is nothing.

        Raises:
            UsageError: a value for RoPE is out of the key's range. Others are checked as they are
                read.
        """
        changed = self
        if overrides.kv:
            values = {key: _as_stored(key, value) for key, value in overrides.kv.items()}
            changed = Metadata({**self._values, **values}, self._source)
            changed.overridden, changed.unread = frozenset(values), set(values)
            changed._of_file = self._of_file or self
        return changed._with_rope(overrides.rope) if overrides.rope.keys else changed

    @property
    def changes(self) -> dict[str, object]:
        """What options replaced by other values than the file's, by key."""
        if self._of_file is None:
            return {}
        return {
            key: value
            for key, value in self._values.items()
            if (key not in self._of_file or value is not self._of_file._values[key])
            and self.get(key) != self._of_file.get(key)
        }

    def _with_rope(self, options: RopeOptions) -> Metadata:
        keys = options.keys
        prefix = self.string("general.architecture")
        for key, (option, value) in keys.items():
            if not isinstance(value, str) and not range_of(f"{prefix}.{key}").holds(value):
                given = getattr(options, option)
                flag = f"--{option.replace('_', '-')}"
                raise UsageError(
                    f"{flag} {given} is out of range: {key} would be {value:g}, "
                    f"expected {range_of(f'{prefix}.{key}')}"
                )
        values = {f"{prefix}.{key}": value for key, (_, value) in keys.items()}
        changed = Metadata({**self._values, **values}, self._source)
        changed.before_rope, changed._of_file = self, self._of_file or self
        changed.overridden, changed.unread = self.overridden, set(self.unread)
        return changed

    def require(self, key: str) -> None:
        """Raise what a getter without a default does if the key is missing."""
        if key not in self:
            raise ModelFileError(f"{self._source}: missing key {quoted(key)}")

    def string(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> str | _Default:
        """The value of `key`, a string."""
        return cast("str | _Default", self._scalar(key, default, (str,), "a string"))

    def integer(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> int | _Default:
        """The value of `key`, an integer of any width (a boolean is not one)."""
        value = self._scalar(key, default, (int,), "an integer")
        return cast("int | _Default", self._in_range(key, value))

    def number(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> float | _Default:
        """The value of `key`, a float or an integer, as a float."""
        value = self._in_range(key, self._scalar(key, default, (float, int), "a number"))
        return float(cast(float, value)) if key in self else cast(_Default, value)

    def boolean(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> bool | _Default:
        """The value of `key`, a boolean."""
        return cast("bool | _Default", self._scalar(key, default, (bool,), "a boolean"))

    def strings(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> list[str] | _Default:
        """The value of `key`, an array of strings."""
        values = self._array(key, default, {str}, "an array of strings")
        return cast("list[str] | _Default", values)

    def integers(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[int] | _Default:
        """The value of `key`, an array of integers of any width."""
        values = self._array(key, default, {int}, "an array of integers")
        return cast("list[int] | _Default", self._all_in_range(key, values))

    def numbers(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[float] | _Default:
        """The value of `key`, an array of floats or of integers, as floats."""
        values = self._array(key, default, {float, int}, "an array of numbers")
        if key not in self:
            return cast(_Default, values)
        self._all_in_range(key, values)
        return [float(value) for value in cast("list[float]", values)]

    def string_array(self, key: str) -> Strings:
        """The value of `key`, an array of strings, undecoded; without items if the key is missing.

        Of the getters for arrays this one and `number_array` are the fast ones.
        """
        value = self._values.get(key)
        strings = value.strings() if isinstance(value, LazyArray) else None
        return Strings.of(self.strings(key, [])) if strings is None else strings

    def number_array(
        self, key: str, default: npt.NDArray[np.generic], *, integers: bool = False
    ) -> npt.NDArray[np.generic]:
        """The value of `key`, an array of numbers, as NumPy's; perhaps a view of the file.

        Args:
            default: the value if the key is missing.
            integers: refuse floats.
        """
        if key not in self:
            return default
        value, allowed = self._values[key], range_of(key)
        array = value.numbers() if isinstance(value, LazyArray) else None
        if array is not None and len(array) and (array.dtype.kind in "iu" or not integers):
            limits = array.min().item(), array.max().item()  # NaN is both, if it is there
            if all(map(allowed.holds, limits)):
                return array
        return np.array(self.integers(key) if integers else self.numbers(key))

    def booleans(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[bool] | _Default:
        """The value of `key`, an array of booleans."""
        return cast(
            "list[bool] | _Default", self._array(key, default, {bool}, "an array of booleans")
        )

    def _scalar(self, key: str, default: object, types: tuple[type, ...], expected: str) -> object:
        value = self._value(key, default)
        if key in self and type(value) not in types:
            raise self._mismatch(key, value, expected)
        return value

    def _array(self, key: str, default: object, types: set[type], expected: str) -> object:
        value = self._value(key, default)
        if key in self and not (isinstance(value, list) and set(map(type, value)) <= types):
            raise self._mismatch(key, value, expected)
        return value

    def _in_range(self, key: str, value: object) -> object:
        if key in self and not range_of(key).holds(cast(float, value)):
            raise self._out_of_range(key, "", value)
        return value

    def _all_in_range(self, key: str, values: object) -> object:
        if key in self:
            items = cast("list[float]", values)
            at = first_outside(key, items)
            if at is not None:
                raise self._out_of_range(key, f" at item {at}", items[at])
        return values

    def _out_of_range(self, key: str, where: str, value: object) -> LocalKVError:
        return self._error(key, f"{value}{where}, expected {range_of(key)}")

    def _error(self, key: str, problem: str) -> LocalKVError:
        if key in self.overridden:
            return UsageError(f"--override-kv: key {quoted(key)} is {problem}")
        return ModelFileError(f"{self._source}: key {quoted(key)} is {problem}")

    def _value(self, key: str, default: object) -> object:
        if key in self:
            return self[key]
        if default is _REQUIRED:
            self.require(key)
        return default

    def _mismatch(self, key: str, value: object, expected: str) -> LocalKVError:
        return self._error(key, f"{_type_of(value)}, expected {expected}")


def _as_stored(key: str, value: str | int | float | bool) -> str | int | float | bool:
    """A value as a file has it: a float as the nearest of 32 bits.

    Raises:
        UsageError: it is too large for that.
    """
    if not isinstance(value, float):
        return value
    try:
        return cast(float, struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise UsageError(f"--override-kv: key {quoted(key)} is {value:g}, too large") from None


_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def _type_of(value: object) -> str:
    """A value's kind, for a message: "a string", "an array of integers"."""
    name = _TYPE_NAMES.get(type(value), type(value).__name__)
    if isinstance(value, list) and value:
        name += f" of {_TYPE_NAMES.get(type(value[0]), 'value')}s"
    return f"{'an' if name[0] in 'aei' else 'a'} {name}"


# Names of `general.file_type`, without MOSTLY_: ggml's `llama_ftype`.
FILE_TYPES: Final = {
    number: name
    for numbers, names in (
        ((0, 1, 2, 3), "F32 F16 Q4_0 Q4_1"),
        (range(7, 13), "Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M"),
        (range(13, 19), "Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K"),
        (range(19, 25), "IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S"),
        (range(25, 33), "IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16"),
        (range(36, 42), "TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0"),
    )
    for number, name in zip(numbers, names.split(), strict=True)
}
_GUESSED = 1024  # a flag on a number that a program had to guess


@dataclass(frozen=True)
class ModelSummary:
    """A header's facts about a model; None for missing ones.

    Attributes:
        architecture: "llama".
        quant: the type of most weights, "Q4_K_M".
        n_ctx_train: tokens of context it was trained with.
    """

    architecture: str | None
    quant: str | None
    n_ctx_train: int | None


def model_summary(path: str | os.PathLike[str]) -> ModelSummary:
    """Read the keys of a file; of a split model, its first part.

    Raises:
        ModelFileError: the file is missing or malformed.
    """
    from localkv.loader.gguf_file import read_metadata  # no model, no NumPy

    metadata = read_metadata(path)
    architecture = metadata.string("general.architecture", default=None)
    return ModelSummary(
        architecture,
        file_type_name(metadata),
        metadata.integer(f"{architecture}.context_length", default=None),
    )


def file_type_name(metadata: Metadata) -> str | None:
    """The type of most weights, "Q4_K_M"; None where the keys do not say."""
    file_type = metadata.integer("general.file_type", default=None)
    return None if file_type is None else FILE_TYPES.get(file_type & ~_GUESSED)
