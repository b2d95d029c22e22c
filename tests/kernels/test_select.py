"""The backend that a device stands for, and what users are told where it can't be had."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest
import torch

from localkv.errors import LocalKVError, UsageError
from localkv.kernels import select
from localkv.kernels.gpu.device import start_triton
from localkv.kernels.select import select_backend, unused_gpu


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "nvidia_driver_is_here", lambda: True)
    monkeypatch.setattr(select, "built_without_cuda", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def old_gpu(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


def test_auto_is_the_cpu_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend("auto").name == "cpu"
    assert unused_gpu() == ""
    assert select_backend("cpu").name == "cpu"
    assert select_backend("reference").name == "reference"


def test_cuda_without_a_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "nvidia_driver_is_here", lambda: False)
    with pytest.raises(UsageError, match="device cuda can't be used: there is no NVIDIA driver"):
        select_backend("cuda")
    assert unused_gpu() == ""


def test_without_torch_it_says_what_to_install(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    for device, package in (("cuda", "'localkv[gpu]'"), ("reference", "torch")):
        with pytest.raises(UsageError, match=f"{device} can't be used: torch is not inst") as error:
            select_backend(device)
        assert f"pip install {package}" in str(error.value.hint)
    assert select_backend("auto").name == "cpu"
    assert unused_gpu().startswith(
        "the GPU is not used: torch is not installed (pip install 'localkv[gpu]'"
    )
    assert unused_gpu("cpu") == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unused_gpu() == ""


def test_a_torch_that_can_not_be_imported_leaves_the_cpu(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "localkv.kernels.gpu.device", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: object())
    assert select_backend("auto").name == "cpu"
    assert unused_gpu().startswith("the GPU is not used: torch can't be imported: ")
    with pytest.raises(UsageError, match="torch can't be imported: "):
        select_backend("cuda")


def test_cuda_without_a_gpu_is_refused(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device cuda can't be used: torch sees no GPU"):
        select_backend("cuda")
    assert unused_gpu() == ""  # the driver may be another container's
    monkeypatch.setattr(select, "built_without_cuda", lambda: True)
    with pytest.raises(UsageError, match="device cuda can't be used: this torch was built without"):
        select_backend("cuda")
    assert unused_gpu().startswith(
        "the GPU is not used: this torch was built without CUDA (install torch's CUDA wheel"
    )


@pytest.mark.usefixtures("old_gpu")
def test_an_old_gpu_is_not_taken() -> None:
    assert select_backend("auto").name == "cpu"
    assert "Tesla T4" in unused_gpu()
    with pytest.raises(UsageError, match=r"Tesla T4 has compute capability 7\.5; 8\.0 is needed"):
        select_backend("cuda")


def test_an_unknown_device_is_told_with_the_choices() -> None:
    with pytest.raises(UsageError) as error:
        select_backend("tpu")
    assert error.value.hint == "use auto, cuda, cpu, reference"


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
