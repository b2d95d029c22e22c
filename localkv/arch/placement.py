"""Where each part of a model is: layers, their feed-forward blocks, the embedding and the output.

A part is what moves as a whole. A *layer* is all of it but the feed-forward block, and its rows of
K and V; so with the block elsewhere (experts in the machine's memory) only hidden states move.
`Offload` is what a user asks for, in llama.cpp's words; `placed` makes a placement of it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from localkv.arch.spec import AttentionSpec
from localkv.config import device_name
from localkv.errors import UsageError, counted, quoted

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec

MANY = 1 << 20
"""Layers, more than any model has."""
EMBEDDING = "token_embd.weight"
HOST = "cpu"
"""The device that every machine has."""


@dataclass(frozen=True)
class Placement:
    """The places of a model's parts, as indices of `devices`.

    Attributes:
        devices: their names, each once: "cpu", "cuda0". Of a whole model each has a part.
        layers: of each layer, without its feed-forward block.
        blocks: of each layer's feed-forward block.
        embedding: of the embedding, and what is added to it.
        output: of the last norm and the output matrix.
    """

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    blocks: tuple[int, ...]
    embedding: int = 0
    output: int = 0

    @classmethod
    def one(cls, device: str, n_layers: int) -> Placement:
        """All of a model in one place."""
        return cls((device,), (0,) * n_layers, (0,) * n_layers)

    @property
    def is_one(self) -> bool:
        """Whether there is one place for all parts."""
        return len(self.devices) == 1

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The devices that have a part, in order."""
        return tuple(sorted({*self.layers, *self.blocks, self.embedding, self.output}))

    @property
    def n_gpu_layers(self) -> int:
        """The layers that are on GPUs, and the output as one more."""
        return sum(self.devices[k].startswith("cuda") for k in (*self.layers, self.output))

    def first(self, n: int) -> Placement:
        """The placement of the model's first `n` layers."""
        return replace(self, layers=self.layers[:n], blocks=self.blocks[:n])

    def with_shared_rows(self, config: ModelSpec) -> Placement:
        """This placement, but with each layer that reads another's K and V where that layer is."""
        layers = list(self.layers)
        for i, layer in enumerate(config.layers):
            if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_from is not None:
                layers[i] = layers[layer.mixer.kv_from]
        return replace(self, layers=tuple(layers))

    def normalised(self) -> Placement:
        """Leave out devices that have no part."""
        new = {old: k for k, old in enumerate(self.used)}
        return Placement(
            tuple(self.devices[old] for old in self.used),
            tuple(new[old] for old in self.layers),
            tuple(new[old] for old in self.blocks),
            new[self.embedding],
            new[self.output],
        )

    def device_of(self, tensor: str, config: ModelSpec) -> int:
        """The device that has a tensor of the file; of an embedding that is the output matrix, too,
        the one where tokens are looked up."""
        kind, layer = unit_of(tensor)
        if layer is not None and layer >= config.n_layers:
            return self.output  # blocks that predict further tokens
        if layer is None:
            return self.output if kind == "output" else self.embedding
        block = kind == "block" and config.layers[layer].ffn is not None
        return (self.blocks if block else self.layers)[layer]

    def in_words(self, config: ModelSpec) -> list[str]:
        """What each device has, a line each."""
        lines = []
        for k, device in enumerate(self.devices):
            here = [i for i, at in enumerate(self.layers) if at == k]
            fed = [i for i, at in enumerate(self.blocks) if at == k and config.layers[i].ffn]
            both = [i for i in here if i in fed or not config.layers[i].ffn]
            parts = [f"layers {_ranges(both)}"] if both else []
            if only := [i for i in here if i not in both]:
                parts.append(f"attention of layers {_ranges(only)}")
            if only := [i for i in fed if i not in both]:
                what = "experts" if all(config.layers[i].moe for i in only) else "blocks"
                parts.append(f"{what} of layers {_ranges(only)}")
            parts += ["the embedding"] if self.embedding == k else []
            parts += ["the output"] if self.output == k else []
            lines.append(f"{device.upper()}: {', '.join(parts)}")
        return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, "0-3, 7"."""
    found = list[list[int]]()
    for i in numbers:
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


_TENSOR = re.compile(r"blk\.(\d+)\.(ffn_|exp_probs_b)?")


def unit_of(tensor: str) -> tuple[str, int | None]:
    """The part that a tensor belongs to: "embedding", "output", or "layer" or "block" and its
    number."""
    match = _TENSOR.match(tensor)
    if match is None:
        is_output = tensor.startswith(("output", "cls", "dense_", "altup_unembd"))
        return ("output" if is_output else "embedding"), None
    return ("block" if match[2] else "layer"), int(match[1])


@dataclass(frozen=True)
class Offload:
    """What a user asks for of a model's places; llama.cpp's options of these names.

    Attributes:
        n_gpu_layers: the last N of its layers and, as one more, the output are on GPUs; None for
            all that fit.
        n_cpu_moe: the experts of the first N layers are on the CPU.
        overrides: (regular expression, device) pairs; the first that finds a tensor's name says
            where the tensor's part is.
        kv_offload: attention, with its rows of K and V, is on GPUs where its layer is.
        split: how much each GPU gets, in proportion; empty for equal parts.
    """

    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    overrides: tuple[tuple[str, str], ...] = ()
    kv_offload: bool = True
    split: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        n_gpu_layers: int | str | None,
        n_cpu_moe: int | str,
        override_tensor: Collection[str],
        kv_offload: bool,
        split: Sequence[float],
    ) -> Offload:
        """From the arguments of `LLM` of these names.

        Raises:
            UsageError: one has no such value.
        """
        for name, value in (("n_gpu_layers", n_gpu_layers), ("n_cpu_moe", n_cpu_moe)):
            if value not in (None, "all") and (not isinstance(value, int) or value < 0):
                raise UsageError(f"{name} is {value!r}", hint='use a number of layers, or "all"')
        if any(not share >= 0 for share in split) or (split and not 0 < sum(split) < math.inf):
            raise UsageError(f"a split of {list(split)}", hint="use shares such as 3,1")
        overrides = parsed_overrides(override_tensor) if override_tensor else ()
        layers = MANY if n_gpu_layers == "all" else n_gpu_layers
        experts = MANY if n_cpu_moe == "all" else n_cpu_moe
        assert not isinstance(layers, str)
        assert not isinstance(experts, str)
        return cls(layers, experts, overrides, kv_offload, tuple(map(float, split)))

    @classmethod
    def of_arguments(cls, given: Mapping[str, Any]) -> Offload:
        """From those arguments of `LLM` by their names; raises as `of`."""
        return cls.of(
            given["n_gpu_layers"],
            given["n_cpu_moe"],
            given["override_tensor"],
            given["offload_kqv"],
            given["tensor_split"] or (),
        )

    @property
    def is_auto(self) -> bool:
        """Whether nothing says which part is where."""
        named = self.n_gpu_layers is not None or self.n_cpu_moe or self.overrides
        return not named and self.kv_offload

    @property
    def is_whole(self) -> bool:
        """Whether all of a model is asked for on GPUs."""
        moved = self.n_cpu_moe or self.overrides
        return self.n_gpu_layers == MANY and not moved and self.kv_offload

    @property
    def flags(self) -> str:
        """Spell it as options of a command line."""
        found = [] if self.n_gpu_layers is None else [f"-ngl {self.n_gpu_layers}"]
        found += [f"--n-cpu-moe {self.n_cpu_moe}"] if self.n_cpu_moe else []
        return " ".join([*found, *([] if self.kv_offload else ["--no-kv-offload"])])

    def placed(
        self, config: ModelSpec, tensors: Mapping[str, Sequence[int]], gpus: Sequence[str]
    ) -> Placement:
        """Where each part of a model goes.

        Args:
            tensors: names and shapes of the model's.
            gpus: the names of the GPUs, at least one.

        Raises:
            UsageError: an override finds nothing, or a part of what moves as a whole, or names a
                device that is not there; or there are more shares than GPUs.
        """
        n = config.n_layers
        n_placed = n + 1 if self.n_gpu_layers is None else min(self.n_gpu_layers, n + 1)
        first, at = n + 1 - n_placed, self._shares(len(gpus))
        devices = (*gpus, HOST)
        host = len(gpus)

        def place(i: int) -> int:
            return host if i < first else min(bisect_right(at, (i - first) / n_placed), host - 1)

        layers = [place(i) for i in range(n)]
        blocks = list(layers)
        for i, layer in enumerate(config.layers):
            if i < self.n_cpu_moe and layer.moe is not None:
                blocks[i] = host
            if not self.kv_offload and layer.mixer is not None:
                layers[i] = host
        found = Placement(devices, tuple(layers), tuple(blocks), host, place(n))
        found = self._overridden(found, config, tensors)
        is_named = any(re.search(pattern, EMBEDDING) for pattern, _ in self.overrides)
        if not is_named and host not in (*found.layers, *found.blocks, found.output):
            found = replace(found, embedding=found.layers[0])
        return found.with_shared_rows(config).normalised()

    def _shares(self, n_gpus: int) -> list[float]:
        """Where each GPU's part of the layers ends, as a share of all."""
        split = self.split or (1.0,) * n_gpus
        if len(split) > n_gpus:
            raise UsageError(
                f"a split into {len(split)} parts, but there is {counted(n_gpus, 'GPU')} to use",
                hint="name as many GPUs with --device cuda0,cuda1",
            )
        split = (*split, *[0.0] * (n_gpus - len(split)))
        return [share / sum(split) for share in accumulate(split)]

    def _overridden(
        self, placement: Placement, config: ModelSpec, tensors: Mapping[str, Sequence[int]]
    ) -> Placement:
        if not self.overrides:
            return placement
        wanted, used = dict[tuple[str, int | None], dict[str, str]](), set[str]()
        for name, shape in tensors.items():
            for pattern, device in self.overrides:
                if not re.search(pattern, name):
                    continue
                used.add(pattern)
                if len([size for size in shape if size > 1]) > 1:
                    wanted.setdefault(unit_of(name), {})[name] = device
                break
        for pattern, _ in self.overrides:
            if pattern not in used:
                raise UsageError(f"-ot {quoted(pattern)} is in no tensor's name")
        layers, blocks = list(placement.layers), list(placement.blocks)
        embedding, output = placement.embedding, placement.output
        for (kind, i), named in wanted.items():
            if i is not None and i >= config.n_layers:
                continue
            k = _device_of_unit((kind, i), named, tensors, placement.devices)
            if kind == "embedding":
                embedding = k
            elif kind == "output":
                output = k
            elif i is not None:
                (blocks if kind == "block" else layers)[i] = k
        return Placement(placement.devices, tuple(layers), tuple(blocks), embedding, output)


def _device_of_unit(
    unit: tuple[str, int | None],
    named: Mapping[str, str],
    tensors: Mapping[str, Sequence[int]],
    devices: Sequence[str],
) -> int:
    """The device of a part of which some tensors are named: all of its large ones must be."""
    own = [name for name, shape in tensors.items() if unit_of(name) == unit and len(shape) > 1]
    large = [name for name in own if "_exps." in name] or own
    missing = next((name for name in large if name not in named), None)
    if missing is not None:
        raise UsageError(
            f"-ot moves {next(iter(named))} but not {missing}, and they are in one place",
            hint="name all matrices of attention (attn_), of experts (_exps) or of the block "
            "(ffn_) of a layer",
        )
    found = {named[name] for name in named}
    if len(found) > 1:
        raise UsageError(
            f"-ot puts tensors that are in one place on {' and '.join(sorted(found))}: "
            f"{', '.join(list(named)[:2])}"
        )
    (device,) = found
    if device not in devices:
        raise UsageError(
            f"-ot names {quoted(device)}, and the devices are {', '.join(devices)}",
            hint="use CPU, or a GPU that --device names",
        )
    return devices.index(device)


def parsed_overrides(texts: Collection[str]) -> tuple[tuple[str, str], ...]:
    """REGEX=DEVICE pairs, several of them with commas between them.

    Raises:
        UsageError: one is not of this form, or no regular expression.
    """
    found = []
    for text in ",".join(texts).split(","):
        pattern, equals, device = text.rpartition("=")
        if not equals or not pattern or not device:
            raise UsageError(
                f"-ot {quoted(text)} is not REGEX=PLACE", hint='such as -ot "ffn_.*_exps=CPU"'
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"-ot {quoted(pattern)}: {error}") from None
        found.append((pattern, device_name(device)))
    return tuple(found)
