"""A GPU on paper: models run on it without memory or a driver, and what they launch is noted.

Its tensors are on torch's meta device: shapes and types without values. So what a real GPU refuses
is refused here as well: an operation on tensors of two devices, and a number that the host asks for
in a recorded step. Triton takes a launch as far as it goes without a GPU. That is to the
compiler, with the types, alignments and compile-time arguments that it found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from localkv.arch.spec import ModelSpec
from localkv.cache.arrays import Step
from localkv.engine.recorded import DecodeLoop, Inputs
from localkv.kernels.backend import Backend
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.products import tile_sizes
from localkv.kernels.gpu.triton_backend import triton_backend
from localkv.loader.known_models import GATES, OUTPUT
from localkv.loader.quantised_format import tensor_format
from localkv.loader.tensor_reader import TensorReader
from localkv.loader.weights import model_weights
from localkv.model import Transformer
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor

META = torch.device("meta")
READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
"""What makes the host wait for a number."""
TO_DEVICE = ("aten::to", "aten::_to_copy")
LARGEST_GRID = (2**31 - 1, 65535, 65535)
"""CUDA C++ Programming Guide, table of technical specifications."""
DEVICES = itertools.count()
HOST_VALUES = (".bias", "conv1d.weight", "shortconv.conv.weight")
"""Ends of names of tensors that are decoded as they are loaded, as vectors are."""


@dataclass(frozen=True)
class Kernel:
    """What Triton was to compile: the arguments of `triton.compiler.ASTSource`, and options.

    Attributes:
        ahead: it was first asked for by what is compiled together, without being run.
    """

    function: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget
    ahead: bool

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    def compile(self) -> Any:
        source = triton.compiler.ASTSource(
            self.function, self.signature, self.constants, self.attributes
        )
        return triton.compile(source, target=self.target, options=self.options)


class PaperDriver:
    """Stands for Triton's driver: kernels are compiled for `target`."""

    def __init__(self, arch: int, device: int) -> None:
        self.target, self.device = GPUTarget("cuda", arch, 32), device

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def paper_driver(arch: int) -> PaperDriver:
    """For which nothing was compiled before."""
    return PaperDriver(arch, next(DEVICES))


@dataclass
class PaperGpu(TorchDispatchMode):
    """A GPU that the backend `backend` uses.

    Attributes:
        kernels: that were needed so far, by what Triton tells them apart by.
        recording: a step is being recorded, and the host must not ask for anything.
    """

    arch: int = 90
    n_processors: int = 132
    kernels: dict[str, Kernel] = field(default_factory=dict)
    recording: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def backend(self) -> Backend:
        return triton_backend(META)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.name().partition(".")[0], kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name in READS and tensors[0].device == META:
            assert not self.recording, (
                f"the host asks for a number while a step is recorded: {name}"
            )
            return torch.ones((), dtype=tensors[0].dtype).item()
        from_paper = len(tensors) > 0 and tensors[-1].device == META
        if name == "aten::copy_" and from_paper and tensors[0].device != META:
            assert not self.recording, "values are brought to the host while a step is recorded"
            return tensors[0].zero_()
        if name in TO_DEVICE and from_paper and kwargs.get("device", META) != META:
            assert not self.recording, "values are brought to the host while a step is recorded"
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if self.recording:
            assert name != "aten::lift_fresh", "the host brings values while a step is recorded"
        return func(*args, **kwargs)

    def launch(self, name: str, grid: tuple[int, ...], *args: Any) -> None:
        for n, most in zip(grid, LARGEST_GRID, strict=True):
            assert 1 <= n <= most, f"{name}: a grid of {grid}"
        for arg in args:
            for tensor in arg if isinstance(arg, tuple) else (arg,):
                if isinstance(tensor, Tensor):
                    assert tensor.device == META, f"{name} is given a tensor of {tensor.device}"

    def launched(self, kernel: Kernel) -> Any:
        """What Triton takes for a compiled kernel."""

        def run(x: int, y: int, z: int, stream: int, *args: Any) -> None:
            self.launch(kernel.name, (x, y, z), *args[5:])

        return SimpleNamespace(
            run=run, launch_metadata=lambda *_: None, function=None, packed_metadata=None
        )


@contextmanager
def paper_gpu(
    monkeypatch: pytest.MonkeyPatch, arch: int = 90, n_processors: int = 132
) -> Iterator[PaperGpu]:
    """Makes a new `PaperGpu` get launches of Triton's kernels, and recordings of steps."""
    gpu = PaperGpu(arch, n_processors)
    driver = paper_driver(arch)

    def do_compile(
        function: Any, key: str, signature: Any, device: int, constants: Any, options: Any,
        attributes: Any, warmup: bool,
    ) -> Any:  # fmt: skip
        kernel = Kernel(
            function, signature, constants, attributes, options.__dict__, driver.target, warmup
        )
        gpu.kernels[f"{kernel.name} {key}"] = kernel
        compiled = gpu.launched(kernel)
        function.device_caches[device][0][key] = compiled
        return compiled

    def record(loop: DecodeLoop, inputs: Inputs, step: Step) -> Step:
        if not loop.records:
            return step

        def recorded() -> Tensor:
            gpu.recording = True
            try:
                return step()
            finally:
                gpu.recording = False

        step()
        return recorded

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(JITFunction, "_do_compile", do_compile)
        patch.setattr(DecodeLoop, "_record", record)
        patch.setattr(tile_sizes, "INTERPRETER", GpuInfo(arch, n_processors, name="paper"))
        tile_sizes.gpu_of.cache_clear()
        try:
            with gpu:
                yield gpu
        finally:
            tile_sizes.gpu_of.cache_clear()


@dataclass(frozen=True)
class PaperTensors:
    """A `TensorSource` of matrices without values; the output is another matrix.

    Attributes:
        type_name: of matrices.
        others: types of matrices that have another one, by name.
    """

    type_name: str
    others: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name.endswith((OUTPUT, *GATES))

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        if len(shape) == 1 or name.endswith(HOST_VALUES):
            rows = torch.zeros(*shape[:-1], 4 * shape[-1], dtype=torch.uint8)
            return PackedTensor(FORMATS["f32"], rows, shape)
        is_output = name == "output.weight"
        fmt = tensor_format(name, shape, self.type_name, is_output=is_output)
        if name in self.others:
            fmt = FORMATS[self.others[name]]
        rows = torch.empty(*shape[:-1], fmt.row_bytes(shape[-1]), dtype=torch.uint8, device=META)
        return PackedTensor(fmt, rows, shape)

    def release(self, name: str) -> None: ...


def paper_model(
    gpu: PaperGpu,
    config: ModelSpec,
    type_name: str,
    n_layers: int,
    others: Mapping[str, str] | None = None,
) -> Transformer:
    """A model of that shape, but with fewer layers: they launch the same kernels."""
    config = replace(config, layers=config.layers[:n_layers])
    backend = gpu.backend
    read = TensorReader(PaperTensors(type_name, others or {}), backend)
    return Transformer(config, model_weights(read, config), backend)
