"""Any number of threads gives the same bits and comes to an end, on machines with fewer cores, too.

All that is left to one thread because it is little is shared out here.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from localkv.cache.layout import SegmentSpec
from localkv.kernels.cpu.attention import packed_attention
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.cpu.layers import chains
from localkv.kernels.cpu.linear import matrices, products
from localkv.kernels.cpu.store import store_kv
from localkv.loader.gguf_file import open_gguf
from localkv.loader.synthetic import synthetic_model
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.system.threads import n_threads, use_threads
from support.forward import new_cache
from support.hybrid_models import hybrid
from support.latent_models import latent_tensors, write_latent
from support.paths import MODELS, ROOT, TESTS
from support.program import clean_env
from support.quick import quick
from support.random_model import variant

COUNTS = (1, 2, 3, 8, 64)
N_PROMPT, N_GENERATED = 270, 4
"""More than a page."""

HYBRIDS = ("qwen35", "nemotron_h", "lfm2", "kimi-linear", "bailingmoe3")
MODELS_BY_NAME = ("llama-tiny", "moe-tiny", "llama-mqa", "minicpm3", *HYBRIDS)
TYPES = {"llama-tiny": "q4_K", "moe-tiny": "q8_0"}


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = n_threads()
    use_threads(n)
    try:
        yield
    finally:
        use_threads(before)


@pytest.fixture(autouse=True)
def _nothing_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(chains, "MANY_VALUES", 0)
    monkeypatch.setattr(matrices, "FEW_PARTS", 0)
    monkeypatch.setattr(products, "LEAST_BYTES", 1)
    monkeypatch.setattr(store_kv, "MANY_VALUES", 0)
    monkeypatch.setattr(store_kv, "MANY_ROWS", 0)


def model_of(name: str, folder: Path) -> Transformer:
    if name in TYPES:
        return synthetic_model(name, TYPES[name], cpu_backend())
    if name in HYBRIDS:
        path = hybrid(name).write(folder / "m.gguf")
    elif name == "minicpm3":
        path = write_latent(folder / "m.gguf", name, latent_tensors(name))
    else:
        path = variant(name).write(folder / "m.gguf")
    return load_model(open_gguf(path), cpu_backend())[0]


def logits(model: Transformer, *segments: SegmentSpec) -> np.ndarray:
    """The bits of the logits of a prompt and some generated tokens."""
    cache = new_cache(model, *segments, n_ctx=512)
    sequence = cache.new_sequence()
    out = []
    for ids in ([7 * i % 90 for i in range(N_PROMPT)], *([i] for i in range(N_GENERATED))):
        batch = cache.batch([(sequence, ids)], logits="all", generated=[len(ids) == 1])
        out.append(model.forward(batch, cache).copy())
        sequence.length += len(ids)
    return np.concatenate(out).view(np.int32)


@pytest.mark.parametrize("name", quick(MODELS_BY_NAME, {"llama-tiny"}))
def test_same_bits(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    segment = SegmentSpec("f16", "f16") if name == "minicpm3" else SegmentSpec("q8_0", "q4_0")
    with threads(1):
        want = logits(model, segment)
    assert np.isfinite(want.view(np.float32)).all()
    for n in COUNTS[1:]:
        with threads(n):
            np.testing.assert_array_equal(logits(model, segment), want, f"{n} threads")


@pytest.mark.slow
@pytest.mark.parametrize("n", COUNTS[1:])
def test_several_at_the_same_time(n: int) -> None:
    """In one process: who finds the helpers taken works alone."""
    model = synthetic_model("llama-tiny", "q4_0", cpu_backend())
    models = [model, *(synthetic_model("llama-tiny", "q4_0", cpu_backend()) for _ in range(2))]
    segment = SegmentSpec("q8_0", "q8_0")
    want = [logits(each, segment) for each in models]
    wrong = list[str]()

    def work(index: int) -> None:
        use_threads(n)
        for _ in range(2):
            if not np.array_equal(logits(models[index], segment), want[index]):
                wrong.append(f"model {index}")

    users = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for user in users:
        user.start()
    for user in users:
        user.join(120)
    assert not any(user.is_alive() for user in users)
    assert not wrong


@pytest.mark.slow
def test_several_processes() -> None:
    """Each with more threads than there are cores."""
    command = [sys.executable, "-m", "localkv", "complete", "-m", MODELS / "tales-4M-F16.gguf"]
    command += ["-p", "The fox", "-n", "60", "--temp", "0", "--ignore-eos", "-t"]
    env = clean_env(PYTHONPATH=f"{ROOT}:{TESTS}")
    processes = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, env=env, text=True)
        for n in (1, 8, 64, 64)
    ]
    texts = {process.communicate(timeout=120)[0] for process in processes}
    assert len(texts) == 1
    assert all(process.returncode == 0 for process in processes)
    assert len(texts.pop()) > 60
