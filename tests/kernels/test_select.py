"""Which backend a device stands for, and what users are told where it can't be had."""

from __future__ import annotations

import subprocess
import sysconfig

import pytest
import torch

from localkv.errors import LocalKVError, UsageError
from localkv.kernels.gpu.driver import start_triton
from localkv.kernels.select import select_backend, unused_gpu, why_no_gpu


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


def test_auto_is_the_cpu_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend("auto").name == "cpu"
    assert unused_gpu() == ""
    assert select_backend("cpu").name == "cpu"
    assert select_backend("reference").name == "reference"


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"device cuda can't be used: (torch sees|this torch)"):
        select_backend("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert why_no_gpu()[0] == "torch sees no GPU"


@pytest.mark.usefixtures("old_gpu")
def test_an_old_gpu_is_not_taken() -> None:
    assert select_backend("auto").name == "cpu"
    assert "Tesla T4" in unused_gpu()
    with pytest.raises(UsageError, match=r"Tesla T4 has compute capability 7\.5; 8\.0 is needed"):
        select_backend("cuda")


def test_an_unknown_device_is_told_with_the_choices() -> None:
    with pytest.raises(UsageError) as error:
        select_backend("tpu")
    assert error.value.hint == "devices: auto, cuda, cpu, reference"


def fail(error: Exception) -> LocalKVError:
    def touch() -> None:
        raise error

    with pytest.raises(LocalKVError) as caught:
        start_triton(touch)
    return caught.value


def test_a_missing_compiler_is_named() -> None:
    error = fail(RuntimeError("Failed to find C compiler. Please specify via CC environment"))
    assert "needs a C compiler" in str(error)
    assert error.hint is not None
    assert "gcc" in error.hint


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    paths = {**sysconfig.get_paths(), "include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    error = fail(subprocess.CalledProcessError(1, ["gcc", "main.c"]))
    assert "no Python.h" in str(error)


def test_other_failures_keep_their_first_line() -> None:
    error = fail(RuntimeError("libcuda.so cannot be found\nmore"))
    assert str(error).startswith("Triton can't start kernels: libcuda.so cannot be found")
    assert "more" not in str(error)
