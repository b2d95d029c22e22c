"""Models that are read into memory instead of being mapped, and weights that are locked there."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.errors import ModelFileError, byte_size
from localkv.loader import weights as loader_weights
from localkv.loader.gguf_file import open_gguf
from localkv.loader.weights import lock_weights, ranges_of
from localkv.system.machine_memory import Lock, whole_pages
from support.random_model import variant


def test_a_copy_has_the_bytes_of_the_file(tiny_model: Path) -> None:
    mapped, read = open_gguf(tiny_model), open_gguf(tiny_model, use_mmap=False)
    for name in mapped.tensors:
        assert np.array_equal(mapped.data(name), read.data(name))


@pytest.mark.parametrize("name", ["llama-tied", "llama-fused-qkv", "qwen2moe"])
@pytest.mark.parametrize("weight_type", [GGMLType.F16, GGMLType.Q4_0])
def test_a_model_that_was_read_computes_the_same(
    tmp_path: Path, name: str, weight_type: GGMLType
) -> None:
    path = variant(name).write(tmp_path / "model.gguf", weight_type)
    mapped, read = LLM(path, n_ctx=64), LLM(path, n_ctx=64, use_mmap=False)
    assert read.gguf.copies is not None
    assert np.array_equal(np.asarray(mapped.logits([1, 2, 3])), np.asarray(read.logits([1, 2, 3])))
    assert read.memory.weights_mapped == 0
    assert read.memory.weights_allocated >= mapped.memory.weights


def test_a_tied_embedding_stays_beside_its_panels(tmp_path: Path) -> None:
    path = variant("llama-tied", n_vocab=992, n_ff=192).write(tmp_path / "m.gguf", GGMLType.Q4_0)
    mapped, read = LLM(path, n_ctx=64), LLM(path, n_ctx=64, use_mmap=False)
    embedding = mapped.gguf.tensors["token_embd.weight"].n_bytes
    assert read.memory.weights == mapped.memory.weights + embedding


def test_a_file_that_was_read_may_change(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model.read_bytes())
    llm = LLM(path, n_ctx=64, use_mmap=False)
    expected = np.asarray(llm.logits([1, 2, 3])).copy()
    path.write_bytes(b"something else")
    assert np.array_equal(np.asarray(llm.logits([1, 2, 3])), expected)


def test_a_file_that_changes_before_it_is_read_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model.read_bytes())
    gguf = open_gguf(path, use_mmap=False)
    name = next(iter(gguf.tensors))
    os.utime(path, ns=(0, 0))
    with pytest.raises(ModelFileError, match="changed while it was in use"):
        gguf.data(name)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        gguf.data(name)


def test_bytes_that_are_given_back_are_gone(tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model, use_mmap=False)
    name = max(gguf.tensors, key=lambda name: gguf.tensors[name].n_bytes)
    data = gguf.data(name)
    assert data.any()
    gguf.release(name)
    assert not data.any()
    assert gguf.data(name).any()


# -- locks


def locked_bytes() -> int:
    """The locked bytes of this process, as Linux counts."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts locked memory")
@pytest.mark.parametrize("weight_type", [GGMLType.F16, GGMLType.Q4_0])
def test_what_products_read_is_locked_until_the_model_is_gone(
    tmp_path: Path, weight_type: GGMLType
) -> None:
    before = locked_bytes()
    llm = LLM(variant("llama").write(tmp_path / "m.gguf", weight_type), n_ctx=64, mlock=True)
    if any("ulimit -l" in warning for warning in llm.warnings):
        pytest.skip("too little memory may be locked")
    weights = llm.engine.model.weights
    pages = whole_pages(ranges_of(weights))
    assert locked_bytes() - before == sum(n for _, n in pages)
    attn_q = weights.layers[0].attention.attn_q.weight
    assert attn_q.reads_rows == (weight_type is GGMLType.F16)
    ((address, n_bytes),) = ranges_of((attn_q,))
    assert n_bytes == attn_q.operands[0].nbytes
    assert any(start <= address < start + n for start, n in pages)
    del llm, weights, attn_q
    gc.collect()
    assert locked_bytes() == before


def test_too_small_a_limit_is_one_warning(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "the limit is 64.00 KiB (ulimit -l); ulimit -l unlimited raises it"
    monkeypatch.setattr(loader_weights, "lock", lambda ranges: Lock((), problem))
    llm = LLM(tiny_model, n_ctx=64, mlock=True)
    n_bytes = sum(n for _, n in ranges_of(llm.engine.model.weights))
    assert llm.warnings == [
        f"only 0 B of {byte_size(n_bytes)} of weights could be locked in memory: {problem}"
    ]
    assert len(llm.logits([1])) == 1


def test_nothing_is_locked_for_a_gpu() -> None:
    backend: Any = SimpleNamespace(hardware="NVIDIA H100")
    weights: Any = None
    assert lock_weights(weights, backend) == (
        "mlock has no effect: the weights are in the memory of the GPU"
    )
