"""What types of a model's matrices cost in predictions, and which types are worth their bytes.

`localkv calibrate --weight-types` measures it (`weight_costs.py`) and keeps it in a file. Costs of
matrices add up, as costs of a cache do. So what is best for a number of bytes is found on the lower
convex hull of each matrix's (bytes, cost): the step that saves most for its bytes comes first.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from localkv.errors import UsageError, printable
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import QuantFormat
from localkv.system.files import read_input, write_whole

KIND, VERSION = "localkv weight profile", 1
HINT = "localkv calibrate -m MODEL --weight-types TYPES -o FILE makes one"
_MOST_BYTES, _MOST_MATRICES, _MOST_VALUES = 64 << 20, 1 << 16, 1 << 48


OUTPUT = "output"


def kind_of(name: str) -> str:
    """What a matrix is for: its name without layer and ".weight"."""
    kind = re.sub(r"^blk\.\d+\.|\.weight$", "", name)
    return OUTPUT if kind == "token_embd" else kind


@dataclass(frozen=True)
class MatrixCosts:
    """One matrix.

    Attributes:
        name: its tensor's.
        shape: (rows, columns).
        kld: mean divergence, in nats, if the matrix alone is of a type and activations stay
            float32, by type.
        activations: what rounding its input to 8 bits adds, in nats; a share of what was measured
            for its layer and its kind.
    """

    name: str
    shape: tuple[int, int]
    kld: Mapping[str, float]
    activations: float

    def n_bytes(self, type_name: str) -> int:
        """Bytes of the matrix in a type."""
        return self.shape[0] * FORMATS[type_name].row_bytes(self.shape[1])

    def cost(self, type_name: str, *, exact: bool) -> float:
        """Nats that a type costs; floats don't round activations, and `exact` says nothing does."""
        rounds = FORMATS[type_name].block_size > 1 and not exact
        return self.kld[type_name] + (self.activations if rounds else 0.0)


@dataclass(frozen=True)
class WholeCosts:
    """All matrices in one type, those whose rows don't fit it in the type beside it.

    Attributes:
        type: its name.
        predicted: the sum of what the matrices cost alone, with float32 activations.
        verified: the divergence with all of them at once.
    """

    type: str
    predicted: float
    verified: float


@dataclass(frozen=True)
class WeightProfile:
    """What was measured of one model.

    Attributes:
        model: the hash of its file (`loader/model_fingerprint.py`).
        name, text: of the model, and what was run through it, for people.
        n_tokens, n_scored: of the text, and those whose predictions were compared.
        imatrix: the name of the importance matrix that types were made with, or "".
        other_bytes: of the tensors that keep their types.
        matrices: in the file's order.
        layers: what 8-bit activations of each layer cost alone, in nats; the output's comes last.
        kinds: the same of all matrices of a kind, such as "ffn_down".
        all_activations: of all matrices together.
        whole: to see whether costs add up.
    """

    model: str
    name: str
    text: str
    n_tokens: int
    n_scored: int
    imatrix: str
    other_bytes: int
    matrices: tuple[MatrixCosts, ...]
    layers: tuple[float, ...]
    kinds: Mapping[str, float]
    all_activations: float
    whole: tuple[WholeCosts, ...]

    def in_one_type(self, fmt: QuantFormat) -> list[str]:
        """The types of the matrices where all have one, or the next larger one that fits."""
        return [
            smallest_of(fmt, one.shape[1], [FORMATS[name] for name in one.kld]).name
            for one in self.matrices
        ]

    def sums(self, types: Sequence[str], *, exact: bool = False) -> tuple[int, float]:
        """The bytes of all tensors with these types of the matrices, and the sum of their costs."""
        pairs = list(zip(self.matrices, types, strict=True))
        n_bytes = sum(one.n_bytes(name) for one, name in pairs)
        return self.other_bytes + n_bytes, math.fsum(
            one.cost(name, exact=exact) for one, name in pairs
        )


def smallest_of(fmt: QuantFormat, n_in: int, formats: Sequence[QuantFormat]) -> QuantFormat:
    """The type itself, or where rows of `n_in` values are no whole blocks, of some formats the
    smallest with as many bits, else the largest."""
    if fmt in formats:
        return fmt
    by_size = sorted(formats, key=lambda one: one.row_bytes(n_in))
    bits = fmt.block_bytes / fmt.block_size
    larger = [one for one in by_size if one.block_bytes / one.block_size >= bits]
    return (larger or by_size[-1:])[0]


class Step(NamedTuple):
    """A larger type of one matrix.

    Attributes:
        slope: nats that a byte saves.
        matrix: its index.
        type: its new type.
        n_bytes: more than before.
        saved: nats.
    """

    slope: float
    matrix: int
    type: str
    n_bytes: int
    saved: float


def hull(points: Mapping[str, tuple[int, float]]) -> list[str]:
    """The names on the lower convex hull of (bytes, cost), from the fewest bytes on.

    Slopes between neighbours only become flatter, and costs fall.
    """
    kept = list[tuple[int, float, str]]()
    for name, (n_bytes, cost) in sorted(points.items(), key=lambda item: item[1]):
        if kept and cost >= kept[-1][1]:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], (n_bytes, cost)):
            kept.pop()
        kept.append((n_bytes, cost, name))
    return [name for _, _, name in kept]


def _slope(a: tuple[Any, ...], b: tuple[Any, ...]) -> float:
    """Nats that a byte saves between two points."""
    saved: float = (a[1] - b[1]) / (b[0] - a[0])
    return saved


class Curve:
    """The best types of all matrices for growing numbers of bytes.

    Attributes:
        start: the types with the fewest bytes on the hulls.
        steps: each from the steepest to the flattest.
    """

    def __init__(self, profile: WeightProfile) -> None:
        self.profile = profile
        hulls = [
            hull({name: (one.n_bytes(name), one.cost(name, exact=False)) for name in one.kld})
            for one in profile.matrices
        ]
        self.start = [names[0] for names in hulls]
        steps = list[Step]()
        for i, (one, names) in enumerate(zip(profile.matrices, hulls, strict=True)):
            for before, after in pairwise(names):
                more = one.n_bytes(after) - one.n_bytes(before)
                saved = one.cost(before, exact=False) - one.cost(after, exact=False)
                steps.append(Step(saved / more, i, after, more, saved))
        self.steps = sorted(steps, key=lambda step: (-step.slope, step.matrix))

    def within(self, budget: float) -> tuple[list[str], int, float] | None:
        """Types, bytes and cost for at most `budget` bytes; None if the fewest are more.

        A step that is too large is passed over with the later ones of its matrix, so that smaller
        ones fill what is left.
        """
        types = list(self.start)
        n_bytes, _ = self.profile.sums(types)
        if n_bytes > budget:
            return None
        full = set[int]()
        for step in self.steps:
            if step.matrix in full:
                continue
            if n_bytes + step.n_bytes > budget:
                full.add(step.matrix)
                continue
            types[step.matrix] = step.type
            n_bytes += step.n_bytes
        return types, *self.profile.sums(types)

    def next_step(self, types: Sequence[str]) -> Step | None:
        """The step from these types that saves most for its bytes; None at the end."""
        order = {(step.matrix, step.type): number for number, step in enumerate(self.steps)}
        for step in self.steps:
            at = order.get((step.matrix, types[step.matrix]), -1)
            if order[step.matrix, step.type] > at:
                return step
        return None


def write_weight_profile(path: str | os.PathLike[str], profile: WeightProfile) -> None:
    """Write a profile.

    Raises:
        UsageError: it can't be written.
    """
    text = json.dumps({"kind": KIND, "version": VERSION, **asdict(profile)}, allow_nan=False)
    try:
        write_whole(path, (text + "\n").encode())
    except OSError as error:
        raise UsageError(f"the weight profile {printable(path)}: {error.strerror}") from error


def read_weight_profile(path: str | os.PathLike[str]) -> WeightProfile:
    """Read a profile, and check all of it.

    Raises:
        UsageError: it can't be read, or is no profile, or holds what can't be.
    """
    what = f"the weight profile {printable(path)}"
    try:
        data = json.loads(read_input(path, _MOST_BYTES, what), parse_constant=_no_number)
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", hint=HINT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what}: not a JSON file", hint=HINT) from error
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
        raise UsageError(f"{what}: not a weight profile of version {VERSION}", hint=HINT)
    try:
        return _profile(data)
    except KeyError as error:
        raise UsageError(f"{what} is damaged: it lacks {error}", hint=HINT) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{what} is damaged: {printable(str(error))}", hint=HINT) from error


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _profile(data: Mapping[str, Any]) -> WeightProfile:
    if not 0 < len(data["matrices"]) <= _MOST_MATRICES:
        raise ValueError(f"{len(data['matrices'])} matrices")
    return WeightProfile(
        model=_text(data["model"]),
        name=_text(data["name"]),
        text=_text(data["text"]),
        n_tokens=_count(data["n_tokens"]),
        n_scored=_count(data["n_scored"]),
        imatrix=_text(data["imatrix"]),
        other_bytes=_count(data["other_bytes"]),
        matrices=tuple(map(_matrix, data["matrices"])),
        layers=tuple(map(_cost, data["layers"])),
        kinds={_text(key): _cost(value) for key, value in data["kinds"].items()},
        all_activations=_cost(data["all_activations"]),
        whole=tuple(
            WholeCosts(_type(one["type"]), _cost(one["predicted"]), _cost(one["verified"]))
            for one in data["whole"]
        ),
    )


def _matrix(data: Mapping[str, Any]) -> MatrixCosts:
    n_out, n_in = map(_count, data["shape"])
    kld = {_type(key): _cost(value) for key, value in data["kld"].items()}
    for name in kld:
        if n_in % FORMATS[name].block_size:
            raise ValueError(f"rows of {n_in} values in {name}")
    if not kld:
        raise ValueError("a matrix without types")
    return MatrixCosts(_text(data["name"]), (n_out, n_in), kld, _cost(data["activations"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is missing")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_VALUES:
        raise ValueError("a count is not one")
    return value


def _cost(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError("a cost is not a number from 0 to a million")
    return float(value)


def _type(value: object) -> str:
    if value not in FORMATS or not FORMATS[str(value)].is_weight:
        raise ValueError("there is a type that is none of weights")
    return str(value)
