"""Well-known models by name, and the tensors that a file of one would list. No torch.

`known_models.toml` is the table. That is enough for planning memory; `synthetic.py` makes models of
random weights from it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localkv.errors import UsageError
from localkv.option_checks import unknown_name
from localkv.quant_formats import FORMATS

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_header import TensorInfo

OUTPUT = "output.weight"
GATES = ("ffn_gate.weight", "ffn_gate_shexp.weight")
"""Ends of names of tensors that most files have, of those that a file may do without."""

PLAUSIBLE: dict[str, Any] = {
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
"""Keys that only matter to text or to accuracy."""

LISTED = "localkv plan --help-all lists the shapes, and the types of weights"


@dataclass(frozen=True, eq=False)
class KnownModel:
    """A model's shape.

    Attributes:
        name: as `--synthetic` takes it.
        architecture: `general.architecture`.
        n_vocab: rows of the embedding.
        keys: metadata without the architecture's prefix.
        present: ends of names of the tensors that it has, of those that a file may do without.
        tensors: shapes of tensors by which the family distinguishes variants.
    """

    name: str
    architecture: str
    n_vocab: int
    keys: Mapping[str, Any]
    present: tuple[str, ...] = (OUTPUT, *GATES)
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def output_matrix(self) -> str:
        """The tensor that logits are made with."""
        return OUTPUT if self.has(OUTPUT) else "token_embd.weight"

    def has(self, tensor: str) -> bool:
        """Whether a file of it has an optional tensor."""
        return tensor in self.tensors or tensor.endswith(self.present)

    @cached_property
    def spec(self) -> ModelSpec:
        """What the architecture's family makes of the keys, as of a file's."""
        from localkv.arch import ARCHS
        from localkv.arch.facts import Facts
        from localkv.loader.metadata import Metadata

        keys = {f"{self.architecture}.{key}": value for key, value in self.keys.items()}
        token_embd = {"token_embd.weight": (self.n_vocab, self.keys["embedding_length"])}
        metadata, shapes = Metadata(keys, self.name), {**token_embd, **self.tensors}
        return ARCHS[self.architecture](Facts(self.architecture, self.name, metadata, shapes))


def _known_models() -> Iterator[KnownModel]:
    """The models of the table, in its order."""
    tables: dict[str, dict[str, Any]] = {}
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for name, own in tomllib.loads(text).items():
        table = _flat(own)
        table = tables[name] = {**tables.get(table.pop("like", ""), {}), **table}
        yield _known_model(name, dict(table))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table's values by dotted keys, but for the tables that are values."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and "cycle" not in value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _known_model(name: str, table: dict[str, Any]) -> KnownModel:
    layers = range(table["block_count"])
    architecture, n_vocab = table.pop("architecture"), table.pop("n_vocab")
    present = () if table.pop("tied", False) else (OUTPUT,)
    present += tuple(table.pop("present", GATES))
    without = {tensor.replace("*", str(i)) for tensor in table.pop("without", ()) for i in layers}
    keys = dict(PLAUSIBLE)
    tensors: dict[str, tuple[int, ...]] = {}
    for key, value in table.items():
        if key.startswith("tensors."):
            name_of = key.removeprefix("tensors.")
            names = dict.fromkeys(name_of.replace("*", str(i)) for i in layers)
            tensors |= {each: tuple(value) for each in names if each not in without}
        elif isinstance(value, dict):
            keys[key] = list(islice(cycle(value["cycle"]), len(layers)))
        else:
            keys[key] = value
    return KnownModel(name, architecture, n_vocab, keys, present, tensors)


KNOWN_MODELS: dict[str, KnownModel] = {model.name: model for model in _known_models()}


def shape_and_type(name: str) -> tuple[str, str]:
    """The model and the type of weights that "SHAPE:TYPE" names, in lower case but for types' K.

    Raises:
        UsageError: there is no such model, or it names no type (of weights: `check_shape`).
    """
    shape, colon, type_name = name.lower().partition(":")
    _check_name(shape)
    if not colon:
        raise UsageError(
            f"--synthetic {name} names no type of weights", hint=f"as in --synthetic {shape}:q4_0"
        )
    return shape, {known.lower(): known for known in FORMATS}.get(type_name, type_name)


def check_shape(name: str, type_name: str) -> None:
    """Refuse what no model can be made of.

    Raises:
        UsageError: there is no such model, or no such type of weights.
    """
    _check_name(name)
    if type_name not in FORMATS or not FORMATS[type_name].is_weight:
        types = [fmt.name for fmt in FORMATS.values() if fmt.is_weight]
        raise unknown_name("unknown type of weights", type_name, types, LISTED)


def _check_name(shape: str) -> None:
    if shape not in KNOWN_MODELS:
        raise unknown_name("unknown shape", shape, KNOWN_MODELS, LISTED)


def shape_tensors(name: str, type_name: str) -> tuple[TensorInfo, ...]:
    """The tensors of a known model, with matrices of one type; offsets are not known.

    Raises:
        UsageError: there is no such model, or no such type of weights.
    """
    from localkv.loader.gguf_header import TensorInfo
    from localkv.loader.quantised_format import tensor_format
    from localkv.loader.weights import listed_tensors

    check_shape(name, type_name)
    tensors = []
    known = KNOWN_MODELS[name]
    for tensor, shape in listed_tensors(known.spec, known.has):
        fmt = tensor_format(tensor, shape, type_name, is_output=tensor == known.output_matrix)
        n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
        tensors.append(TensorInfo(tensor, shape, fmt, n_bytes, offset=0, part=0))
    return tuple(tensors)
