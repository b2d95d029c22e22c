"""Makes a model file of another type of weights, byte for byte as llama-quantize does.

Tensors are read from the mapped file, encoded in pieces by several threads, and written in order;
no more than a few pieces are in memory.
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localkv.errors import LocalKVError, ModelFileError, UsageError, byte_size, printable, quoted
from localkv.kernels.cpu.jit.specialize import OnKernel, compiling_ahead
from localkv.kernels.cpu.quantize.rows import ONLY_WEIGHTED, encode_rows, encode_source
from localkv.loader import gguf_copy
from localkv.loader.error_feedback import TYPES as FED_TYPES
from localkv.loader.error_feedback import Moments, encode_with_feedback
from localkv.loader.gguf_copy import NewFile, NewTensor
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.importance import Importance
from localkv.loader.model_header import model_spec
from localkv.loader.quantised_format import (
    FILE_TYPES,
    NEEDS_IMPORTANCE,
    OUTPUT,
    TOKEN_EMBEDDINGS,
    Mixture,
    ModelFacts,
    TypeChoices,
    trimmed,
    write_order,
)
from localkv.loader.smoothing import SMOOTHED, input_channels, matrix_inputs
from localkv.loader.split_name import part_names
from localkv.loader.tensor_reader import FileTensors
from localkv.quant_formats.base import QuantFormat, split_blocks
from localkv.system.files import check_place, written_whole

PIECE_VALUES = 1 << 18
"""Values of a piece, at least 16 rows: 1 MiB of floats, which stay in the second-level cache."""
QUANTIZATION_VERSION = 2
_MOST_TEXT = 127
"""Bytes of a text about the importance matrix, as in llama-quantize."""

Floats = NDArray[np.float32]
Errors = NDArray[np.float64]
"""float64 [3] of a tensor: the sum of squared errors; of these times the importance of their
columns; and of the importance of all values, 0 without any."""
MomentsOf = Callable[[str], Moments | None]
"""The name of a matrix -> what the rows are like that meet it; None if nobody knows."""
FED_PIECE_VALUES = 1 << 20
"""Values of a piece that is rounded with feedback: columns of fewer rows would take as long."""
OnTensor = Callable[[int, int, str], None]
"""(how many tensors are done, of how many, the name of the next one)."""


@dataclass(frozen=True)
class Conversion:
    """A tensor of the old file, and what becomes of it.

    Attributes:
        source: as it is.
        goal: as it will be.
        importance: float32 [experts, n_in] of its columns, or None.
        factors: what its values are multiplied with (`loader/smoothing.py`): float32 [n],
            [n_out, 1] and [1, n_in].
    """

    source: TensorInfo
    goal: NewTensor
    importance: Floats | None
    factors: tuple[Floats, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether its values are rounded again, or copied as bytes."""
        return self.source.format != self.goal.format or bool(self.factors)

    @property
    def can_feed_back(self) -> bool:
        """Whether it can be rounded with error feedback: a matrix, and no stack of experts."""
        is_matrix = len(self.source.shape) == 2 and self.source.shape[0] > 1
        return self.changes and is_matrix and self.goal.format.name in FED_TYPES


@dataclass(frozen=True)
class Part:
    """A file to be written, and where its tensors come from."""

    file: NewFile
    conversions: Sequence[Conversion]


@dataclass(frozen=True)
class Quantization:
    """All that is to be done, checked.

    Attributes:
        gguf: the old file.
        parts: the new ones; one, unless the old file's parts are kept.
        keeps_split: the new files' names are numbered.
        without_importance: matrices of which the importance matrix says nothing.
        n_smoothed: matrices whose input is smoothed.
    """

    gguf: GGUFFile
    parts: Sequence[Part]
    keeps_split: bool
    without_importance: Sequence[str]
    n_smoothed: int = 0

    @property
    def conversions(self) -> list[Conversion]:
        return [item for part in self.parts for item in part.conversions]

    @property
    def n_bytes(self) -> int:
        """Bytes of all new files."""
        return sum(part.file.n_bytes for part in self.parts)

    def paths(self, out: Path) -> list[Path]:
        """Where the files go: `out`, or NAME-00001-of-00003.gguf and so on."""
        if not self.keeps_split:
            return [out]
        name = out.name.removesuffix(".gguf")
        return [out.with_name(part) for part in part_names(name, len(self.parts))]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        choices: types of tensors; None to copy all of them.
        importance: how much columns count, or None.
        keep_split: as many files as the old model has.
        allow_requantize: also of tensors that are no floats.
        pruned: layers that are left out.
        is_trial: only sizes are wanted, so that an importance matrix may be missing.
        smooth: the strength that inputs of matrices are smoothed with, 0 for none.
    """

    choices: TypeChoices | None
    importance: Importance | None = None
    keep_split: bool = False
    allow_requantize: bool = False
    pruned: Sequence[int] = ()
    is_trial: bool = False
    smooth: float = 0.0


def model_facts(gguf: GGUFFile) -> ModelFacts:
    """What of a file's metadata the types of tensors depend on."""
    keys = gguf.metadata
    architecture = keys.string("general.architecture")

    def first(key: str, default: int) -> int:
        name = f"{architecture}.{key}"
        value = keys.get(name, default)
        return value if isinstance(value, int) else keys.integers(name)[0]

    n_head = first("attention.head_count", 0)
    return ModelFacts(
        architecture,
        keys.integer(f"{architecture}.block_count", 0),
        keys.integer(f"{architecture}.expert_count", 0),
        n_head,
        first("attention.head_count_kv", n_head),
    )


@dataclass
class _Renamed:
    """Names of tensors once layers are left out, and their old ones."""

    old: dict[str, str] = field(default_factory=dict)
    n_layers: int = 0


def _renamed(gguf: GGUFFile, pruned: Sequence[int]) -> _Renamed:
    renamed = _Renamed()
    if not pruned:
        renamed.old = {name: name for name in gguf.tensors}
        return renamed
    facts = model_facts(gguf)
    unknown = [layer for layer in pruned if layer >= facts.n_layers]
    if unknown:
        raise UsageError(f"there is no layer {unknown[0]}: the model has {facts.n_layers}")
    for key in gguf.metadata:
        if key.startswith(f"{facts.architecture}.") and isinstance(gguf.metadata[key], list):
            raise UsageError(
                f"layers of this model can't be left out: {key} has a value for each of them"
            )
    kept = [layer for layer in range(facts.n_layers) if layer not in set(pruned)]
    numbers = {old: new for new, old in enumerate(kept)}
    for name in write_order(list(gguf.tensors)):
        found = re.match(r"blk\.(\d+)\.", name)
        if found is None:
            renamed.old[name] = name
        elif int(found[1]) in numbers:
            renamed.old[f"blk.{numbers[int(found[1])]}.{name[found.end() :]}"] = name
    renamed.n_layers = len(kept)
    return renamed


def plan_quantization(gguf: GGUFFile, request: Request) -> Quantization:
    """Decide the type of each tensor, and check that it can be made.

    Raises:
        UsageError: a tensor can't be of its type, needs an importance matrix, or is rounded
            already; or the model has nothing that can be smoothed.
        ModelFileError: the importance matrix is another model's.
    """
    renamed = _renamed(gguf, request.pruned)
    factors = _factors(gguf, request) if request.smooth else {}
    names = write_order(list(renamed.old))
    if request.keep_split:
        places = {new: gguf.tensors[old] for new, old in renamed.old.items()}
        names.sort(key=lambda name: (places[name].part, places[name].offset))
    choices = request.choices
    if choices is not None:
        choices = replace(choices, has_importance=request.importance is not None)
        mixture = Mixture(model_facts(gguf), choices, names)
    conversions, without = list[Conversion](), list[str]()
    for name in names:
        info = gguf.tensors[renamed.old[name]]
        fmt = info.format
        if choices is not None:
            fmt = mixture.format_of(name, info.shape, info.format)
        goal = NewTensor(name, trimmed(info.shape), fmt)
        importance, own = None, factors.get(info.name, ())
        if fmt != info.format or own:
            is_matrix = len(info.shape) > 1
            if request.importance is not None and (is_matrix or fmt != info.format):
                importance = request.importance.of(info.name, info.shape)
                if importance is None:
                    without.append(name)
            _check(goal, info, importance, request)
        for columns in (by for by in own if by.shape[0] == 1 and importance is not None):
            importance = (importance / np.square(columns)).astype(
                np.float32
            )  # of activations that are divided
        conversions.append(Conversion(info, goal, importance, own))
    parts = _parts(gguf, conversions, request, renamed.n_layers)
    n_smoothed = sum(by.shape[0] == 1 for own in factors.values() for by in own)
    return Quantization(gguf, parts, request.keep_split, without, n_smoothed)


def _factors(gguf: GGUFFile, request: Request) -> dict[str, tuple[Floats, ...]]:
    """What tensors are multiplied with, by their names in the file.

    Raises:
        UsageError: the importance matrix has no input that can be smoothed, or there is none.
    """
    config, found = model_spec(gguf), dict[str, tuple[Floats, ...]]()
    assert request.importance is not None
    inputs = matrix_inputs(config, gguf.tensors)
    if not inputs:
        raise UsageError(
            f"no matrix of this {config.architecture} model has an input that can be smoothed",
            hint="leave out --smooth",
        )
    for one in inputs:
        known = (request.importance.of(name, gguf.tensors[name].shape) for name in one.readers)
        means = next((columns[0] for columns in known if columns is not None), None)
        if means is None or not one.makers:
            continue
        columns = _column_sizes(gguf, one.readers)
        channels = input_channels(np.sqrt(means), columns, request.smooth)
        for name, by in one.tensor_factors(channels, gguf.tensors).items():
            found[name] = (*found.get(name, ()), by)
    if not found:
        raise UsageError(
            f"{printable(request.importance.path)} has no matrix whose input can be smoothed",
            hint="take an importance matrix of the same model",
        )
    return found


def _column_sizes(gguf: GGUFFile, names: Sequence[str]) -> NDArray[np.float64]:
    """Root mean squares of the columns of matrices together: [n_in]."""
    squares, n_rows = np.zeros(gguf.tensors[names[0]].shape[-1]), 0
    for name in names:
        for _, tile in FileTensors(gguf).packed(name, gguf.tensors[name].shape).row_tiles():
            values = tile.decode()
            squares += np.einsum("ij,ij->j", values, values)
            n_rows += len(values)
    return np.sqrt(squares / n_rows)


def _check(goal: NewTensor, info: TensorInfo, importance: Floats | None, request: Request) -> None:
    """Refuse what can't be made, or would be of no use."""
    name, fmt = goal.name, goal.format
    if info.format.block_size > 1 and not request.allow_requantize:
        raise UsageError(
            f"tensor {quoted(name)} is of type {info.format.name}, which is rounded already",
            hint="--allow-requantize rounds it once more, which costs much; a file in F16, BF16 or "
            "F32 is better",
        )
    is_small = fmt.name in NEEDS_IMPORTANCE
    assert request.choices is not None
    is_small |= fmt.name == "q2_K" and request.choices.file_type == "Q2_K_S"
    if not is_small or importance is not None or request.is_trial:
        return
    if name not in (*TOKEN_EMBEDDINGS, OUTPUT) or fmt.name in ONLY_WEIGHTED:
        raise UsageError(
            f"{fmt.name}, the type of tensor {quoted(name)}, needs an importance matrix"
            + (" that has the tensor" if request.importance is not None else ""),
            hint="llama-imatrix measures one, --imatrix FILE names it",
        )


def _parts(
    gguf: GGUFFile, conversions: Sequence[Conversion], request: Request, n_layers: int
) -> list[Part]:
    keys = gguf_copy.read_keys(gguf.parts[0])
    for key in ("split.no", "split.count", "split.tensors.count"):
        keys.pop(key, None)
    added = {"general.quantization_version": gguf_copy.u32(QUANTIZATION_VERSION)}
    if request.choices is not None:
        number = FILE_TYPES[request.choices.file_type].number
        added["general.file_type"] = gguf_copy.u32(number)
    elif "general.file_type" in keys:
        added["general.file_type"] = keys["general.file_type"]
    if request.importance is not None:
        added |= _importance_keys(request.importance)
    if request.smooth:
        added[SMOOTHED] = gguf_copy.f32(request.smooth)
    if request.pruned:
        architecture = gguf.metadata.string("general.architecture")
        added[f"{architecture}.block_count"] = gguf_copy.u32(n_layers)
    for key, value in added.items():
        keys.pop(key, None)
        keys[key] = value
    n_parts = 1
    if request.keep_split:
        n_parts += max(item.source.part for item in conversions)
    parts = []
    for number in range(n_parts):
        mine = [item for item in conversions if n_parts == 1 or item.source.part == number]
        own_keys = keys if number == 0 else {}
        if n_parts > 1:
            own_keys |= {
                "split.no": gguf_copy.u16(number),
                "split.count": gguf_copy.u16(n_parts),
                "split.tensors.count": gguf_copy.i32(len(conversions)),
            }
        alignment = gguf.alignment if number == 0 else gguf_copy.DEFAULT_ALIGNMENT
        parts.append(Part(NewFile(own_keys, [item.goal for item in mine], alignment), mine))
    return parts


def _importance_keys(importance: Importance) -> Mapping[str, bytes]:
    """What a file says of the importance matrix that it was made with."""

    def cut(value: str) -> bytes:
        data = value.encode("utf-8", "surrogateescape")[:_MOST_TEXT]
        return gguf_copy.text(data.decode("utf-8", "surrogateescape"))

    keys = {"quantize.imatrix.file": cut(importance.path)}
    if importance.datasets:
        keys["quantize.imatrix.dataset"] = cut(importance.datasets[0])
    keys["quantize.imatrix.entries_count"] = gguf_copy.u32(len(importance.columns))
    if importance.n_chunks > 0:
        keys["quantize.imatrix.chunks_count"] = gguf_copy.u32(importance.n_chunks)
    return keys


def check_goal(plan: Quantization, out: Path) -> None:
    """Refuse a place that can't be written, or has too little room, before anything is written.

    Raises:
        UsageError: it can't, or is the model itself.
        LocalKVError: the disk is too full.
    """
    paths = plan.paths(out)
    for path in paths:
        try:
            check_place(path)
        except OSError as error:
            raise UsageError(f"{printable(path)} can't be written: {error.strerror}") from None
        if any(path.exists() and path.samefile(part) for part in plan.gguf.parts):
            raise UsageError(f"{printable(path)} is the model itself", hint="name another file")
    free = shutil.disk_usage(paths[0].resolve().parent).free
    if free < plan.n_bytes:
        raise LocalKVError(
            f"{printable(paths[0].parent)} has {byte_size(free)} left, "
            f"and the file takes {byte_size(plan.n_bytes)}",
            hint="a smaller type, or a folder on another disk",
        )


def needed_kernels(plan: Quantization, feeds: bool = False) -> list[tuple[QuantFormat, bool]]:
    """The types of `encode_rows` that the tensors need, and whether with importance.

    Args:
        feeds: errors are fed back.
    """
    kinds = {
        (
            item.goal.format.name,
            item.importance is not None or (feeds and item.can_feed_back),
        ): item.goal.format
        for item in plan.conversions
        if item.changes and item.goal.format.block_size > 1
    }
    return [(fmt, weighted) for (_, weighted), fmt in kinds.items()]


def write_files(
    plan: Quantization,
    out: Path,
    n_threads: int,
    on_tensor: OnTensor = lambda done, total, name: None,
    on_kernel: OnKernel = lambda done, total: None,
    errors: dict[str, Errors] | None = None,
    moments_of: MomentsOf | None = None,
) -> None:
    """Make the files; they take their names once all of them are whole.

    Args:
        errors: filled with each new tensor's, if it is given, which takes some more time.
        moments_of: of matrices that are rounded with error feedback, by their names in the old
            file; None rounds each value by itself.

    Raises:
        ModelFileError: a tensor has a value that is not finite, or too large for its type; or the
            model was changed meanwhile.
        OSError: a file can't be written.
    """
    wanted = needed_kernels(plan, moments_of is not None)
    sources = [encode_source(fmt, weighted=weighted) for fmt, weighted in wanted]
    with compiling_ahead(sources, n_cores=n_threads, on_kernel=on_kernel):
        pass
    total, done = len(plan.conversions), 0
    with ExitStack() as stack, ThreadPoolExecutor(n_threads) as pool:
        files = [stack.enter_context(written_whole(path)) for path in plan.paths(out)]
        for part, file in zip(plan.parts, files, strict=True):
            file.write(part.file.header())
            for item in part.conversions:
                on_tensor(done, total, item.goal.name)
                moved = None if errors is None else errors.setdefault(item.goal.name, np.zeros(3))
                moments = None
                if moments_of is not None and item.can_feed_back:
                    moments = moments_of(item.source.name)
                for data in _pieces(plan.gguf, item, pool, n_threads, moved, moments):
                    file.write(data.data)
                part.file.pad(file, item.goal)
                plan.gguf.release(item.source.name)
                done += 1
        plan.gguf.check_unchanged()


def _pieces(
    gguf: GGUFFile,
    item: Conversion,
    pool: ThreadPoolExecutor,
    n_threads: int,
    moved: Errors | None,
    moments: Moments | None,
) -> Iterator[NDArray[np.uint8]]:
    """The new bytes of a tensor, a piece at a time, whose errors are added to `moved`."""
    data = gguf.data(item.source.name)
    rows = data.reshape(-1, data.shape[-1])
    if not item.changes:
        yield rows
        return
    matrix_rows = item.source.shape[-2] if len(item.source.shape) > 1 else 1
    n_values = PIECE_VALUES if moments is None else FED_PIECE_VALUES
    step = max(16, n_values // item.source.shape[-1] // 16 * 16)
    waiting = deque[Future[tuple[NDArray[np.uint8], Errors | None]]]()

    def first_one() -> NDArray[np.uint8]:
        made, errors = waiting.popleft().result()
        if moved is not None and errors is not None:
            np.add(moved, errors, out=moved)
        return made

    try:
        for matrix, first in enumerate(range(0, len(rows), matrix_rows)):
            importance = None
            if item.importance is not None:
                importance = item.importance[min(matrix, len(item.importance) - 1)]
            for start in range(first, first + matrix_rows, step):
                part = slice(start, min(start + step, first + matrix_rows))
                factors = [by[part] if by.shape[-1] == 1 else by for by in item.factors]
                given = importance, moments, factors, moved is not None
                waiting.append(pool.submit(_made, item, rows[part], *given))
                if len(waiting) > 2 * n_threads:
                    yield first_one()
        while waiting:
            yield first_one()
    finally:
        for future in waiting:
            future.cancel()


def _made(
    item: Conversion,
    rows: NDArray[np.uint8],
    importance: Floats | None,
    moments: Moments | None,
    factors: Sequence[Floats],
    is_measured: bool,
) -> tuple[NDArray[np.uint8], Errors | None]:
    """Rows of the old type in the new one, multiplied with their factors, checked, and their errors
    if they are measured."""
    fmt, source = item.goal.format, item.source.format
    x = source.codec.decode(split_blocks(source, rows)).reshape(len(rows), -1)
    for by in factors:
        x = x * by
    if not np.isfinite(x).all():
        raise ModelFileError(
            f"tensor {quoted(item.source.name)} has values that are not finite numbers",
            hint="the file is damaged, or was made by a training that failed",
        )
    if moments is not None:
        weights = moments.importance if importance is None else importance
        out = encode_with_feedback(fmt, x, weights, moments)
    elif fmt.block_size > 1:
        out = encode_rows(fmt, x, importance)
    else:
        (plane,) = fmt.codec.encode(x)
        out = plane.reshape(len(rows), -1)
    if not _is_finite(fmt, out):
        raise ModelFileError(
            f"tensor {quoted(item.source.name)} has values that are too large for {fmt.name}",
            hint=f"--tensor-type '{re.escape(item.source.name)}=bf16' keeps them",
        )
    return out, _errors(fmt, x, out, importance) if is_measured else None


def _errors(
    fmt: QuantFormat, x: Floats, rows: NDArray[np.uint8], importance: Floats | None
) -> Errors:
    made = fmt.codec.decode(split_blocks(fmt, rows)).reshape(x.shape)
    columns = np.square(made.astype(np.float64) - x).sum(0)
    weights = np.zeros(len(columns)) if importance is None else importance.astype(np.float64)
    return np.array([columns.sum(), columns @ weights, len(x) * weights.sum()])


def _is_finite(fmt: QuantFormat, rows: NDArray[np.uint8]) -> bool:
    """Whether the floats among the fields are finite."""
    if fmt.name in ("f16", "bf16"):
        exponent = 0x7C00 if fmt.name == "f16" else 0x7F80
        return not (rows.view(np.uint16) & exponent == exponent).any()
    for plane, field_bytes in zip(fmt.planes, split_blocks(fmt, rows), strict=True):
        if plane.n_bytes == 2 and plane.name in ("d", "m", "dmin"):
            halves = np.ascontiguousarray(field_bytes).view(np.uint16)
            if (halves & 0x7C00 == 0x7C00).any():
                return False
    return True
