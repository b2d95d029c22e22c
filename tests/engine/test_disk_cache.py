"""Texts on a disk: the same bits from there, and never wrong ones."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.disk_cache import DiskCache
from localkv.engine.disk_folder import DiskFolder, disk_folder
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.prefix import Text
from localkv.errors import UsageError
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.held_pages import check_pages
from support.quick import quick

N_CTX = 1024
IDENTITY = {"model": "1"}
IDS = np.random.default_rng(3).integers(96, size=900).tolist()
CACHES = {
    "f16": CacheConfig(n_ctx=N_CTX),
    "packed": CacheConfig("q8_0", "q5_1", n_ctx=N_CTX),
    "tail": CacheConfig("q4_0", "q8_0", n_ctx=N_CTX, kv_tail=40, kv_sink=3),
    "channels": CacheConfig("q4_1c", "q4_1", n_ctx=N_CTX),
    "long groups": CacheConfig("kv3_1c128", "kv2_0", n_ctx=N_CTX),
}
Load = Callable[[str], Transformer]


def engine_on(
    model: Transformer,
    folder: Path | None,
    cache: CacheConfig = CACHES["packed"],
    *,
    identity: dict[str, str] = IDENTITY,
    most: int = 1 << 30,
    problems: list[str] | None = None,
    n_batch: int = 128,
) -> Engine:
    engine = Engine(model, cache, n_batch=n_batch)
    if folder is not None:
        told = [].append if problems is None else problems.append
        files = DiskFolder(folder, most)
        engine.slot.keep_on_disk(
            DiskCache(files, engine.cache, identity, exact=True, on_problem=told)
        )
    return engine


def options(n: int, **others: object) -> GenerationOptions:
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=96)
    return GenerationOptions(sampler=sampler, max_tokens=n, **others)  # type: ignore[arg-type]


def answer(engine: Engine, ids: list[int], n: int = 5, **others: object) -> tuple[list[int], int]:
    """Tokens drawn after a prompt, and how many of the prompt's were reused."""
    generation = BatchEngine(engine).generate(ids, options(n, **others))
    return list(generation), generation.stats.n_reused


def logits(engine: Engine, ids: list[int]) -> bytes:
    """The logits of a prompt's last token, and of a generated one after it."""
    text, rows = Text(list(ids), len(ids)), list[bytes]()

    def work() -> None:
        for token in (7, 11):
            engine.slot.take(text)
            rows.append(np.array(engine.slot.logits(text)).tobytes())
            text.ids.append(token)

    engine.slot.turn(work)
    return b"".join(rows)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*-*") if path.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


CASES = [
    *(("llama", cache) for cache in CACHES),
    *((name, cache) for name in ("gemma3", "plm", "qwen35") for cache in ("f16", "packed")),
    ("gemma3", "channels"),
]


@pytest.mark.parametrize(
    ("name", "cache"),
    quick(
        CASES, [("llama", "packed"), ("llama", "channels"), ("gemma3", "f16"), ("qwen35", "f16")]
    ),
)
def test_a_text_goes_on_with_the_same_bits(load: Load, folder: Path, name: str, cache: str) -> None:
    """After a restart: where it ended, longer, cut within a block, with another end; each as an
    engine has it that evaluates all of it."""
    model, config = load(name), CACHES[cache]
    first = engine_on(model, folder, config)
    drawn, _ = answer(first, IDS[:700])
    first.close()
    assert files_in(folder)
    prompts = [IDS[:700], [*IDS[:700], 1, 2, 3], IDS[:600], [*IDS[:690], 5, 5, *IDS[:90]]]
    for number, ids in enumerate(prompts):
        second, plain = engine_on(model, folder, config, n_batch=96), engine_on(model, None, config)
        assert logits(second, ids) == logits(plain, ids), number
        assert second.slot.disk is not None
        counts = second.slot.disk.counts
        assert counts.n_damaged == 0
        if number < 2:
            assert counts.n_tokens >= 690
            again = engine_on(model, folder, replace(config, n_sequences=2))
            assert answer(again, ids)[1] >= 690
        check_pages(second.cache)
    if name == "llama" and "tail" not in cache and config.type_k != "q4_1c":
        assert counts.n_tokens >= 690
    assert answer(second, IDS[:700])[0] == drawn


def test_what_leaves_the_pages_comes_back(load: Load, folder: Path) -> None:
    """There are more texts than the cache has room for, two at a time, and no page is lost."""
    config = replace(CACHES["packed"], n_sequences=2, n_tokens=1024)
    engine = engine_on(load("llama"), folder, config)
    texts = [[number, *IDS[number : number + 300]] for number in range(8)]
    first = [answer(engine, ids) for ids in texts]
    assert [reused for _, reused in first] == [0] * 8
    assert engine.slot.prefixes.n_dropped
    assert engine.slot.disk is not None
    assert engine.slot.disk.flush(10)
    batch = BatchEngine(engine)
    generations = [batch.generate(ids, options(5)) for ids in texts]
    while not all(one.has_ended for one in generations):
        batch.step()
    assert [list(one) for one in generations] == [drawn for drawn, _ in first]
    assert sum(one.stats.n_reused >= 300 for one in generations) >= 6
    assert batch.pages.lost == 0
    check_pages(engine.cache)


def test_who_is_cancelled_while_it_is_read_leaves_no_pages_taken(load: Load, folder: Path) -> None:
    first = engine_on(load("llama"), folder)
    answer(first, IDS[:700])
    first.close()
    engine = engine_on(load("llama"), folder, replace(CACHES["packed"], n_sequences=2))
    batch = BatchEngine(engine)
    generation = batch.generate(IDS[:700], options(5))
    rows = batch.rows
    rows.begin(generation.request, [])  # a piece
    reading = rows.reading
    if reading is None:  # it was quick
        assert generation.request.sequence is not None
        return
    assert batch.pages.lost == 0
    generation.close()
    batch.step()
    assert rows.reading is None
    assert batch.pages.lost == 0
    check_pages(engine.cache)


def test_a_reading_breaks_off_with_the_turn(load: Load, folder: Path) -> None:
    """After an exception the cache starts over, and what was being read has no pages."""
    first = engine_on(load("llama"), folder)
    answer(first, IDS[:700])
    first.close()
    engine = engine_on(load("llama"), folder, replace(CACHES["packed"], n_sequences=2))
    slot, ids = engine.slot, Text(IDS[:700], 700).marked(699)
    assert slot.disk is not None
    found = slot.disk.find(ids, 0)
    assert found is not None
    reading = slot.disk.reading(slot.prefixes, ids, found)
    assert not reading.go_on(0)
    engine.cache.start_over([engine.sequence])
    assert reading.go_on(10)
    reading.give_up()
    assert not slot.prefixes.texts
    check_pages(engine.cache)


def test_other_models_texts_and_callers_are_not_found(load: Load, folder: Path) -> None:
    model = load("llama")
    first = engine_on(model, folder)
    answer(first, IDS[:300])
    answer(first, IDS[:400], salt=1, origin=b"one")
    answer(first, IDS[100:500], salt=2)
    first.close()
    others = [
        engine_on(model, folder, identity={"model": "2"}),
        engine_on(model, folder, CACHES["f16"]),
    ]
    assert [answer(one, IDS[:300])[1] for one in others] == [0, 0]
    second = engine_on(model, folder)
    assert answer(second, IDS[:400], salt=1, origin=b"two")[1] == 0
    assert answer(second, IDS[100:500], salt=2)[1] == 0
    assert answer(second, IDS[:400], salt=3, origin=b"one")[1] == 399
    assert answer(second, IDS[:300])[1] == 299


def test_a_file_under_a_wrong_address_is_refused(load: Load, folder: Path) -> None:
    """An address proves nothing: tokens are compared, those before the block included."""
    model = load("llama")
    first = engine_on(model, folder)
    answer(first, IDS[:600])
    answer(first, [1, *IDS[1:600]])
    first.close()
    found = files_in(folder)
    sizes = {path: path.stat().st_size for path in found}
    for one in found:
        for other in found:
            if sizes[one] == sizes[other] and one != other:
                shutil.copy(one, f"{other}.new")
    for path in folder.rglob("*.new"):
        path.rename(path.with_suffix(""))
    second, plain = engine_on(model, folder), engine_on(model, None)
    assert logits(second, IDS[:600]) == logits(plain, IDS[:600])
    assert second.slot.disk is not None
    assert second.slot.disk.counts.n_damaged


@pytest.fixture(scope="module")
def written(load: Load, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A folder with two texts, one of recurrent layers among its files, and right logits."""
    folder = tmp_path_factory.mktemp("written") / "disk"
    for name in ("llama", "qwen35"):
        engine = engine_on(load(name), folder, identity={"model": name})
        answer(engine, IDS[:300])
        engine.close()
    right = [logits(engine_on(load(name), None), IDS[:300]) for name in ("llama", "qwen35")]
    return folder, right[0], right[1]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_anywhere_costs_an_evaluation(
    load: Load,
    written: tuple[Path, bytes, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    """A bit that flips, a file that is cut short or longer, at any place: the same logits."""
    folder = tmp_path_factory.mktemp("damaged") / "disk"
    shutil.copytree(written[0], folder)
    path = data.draw(st.sampled_from(files_in(folder)))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 2000))
    what = data.draw(st.sampled_from(("flip", "cut", "longer", "swap")))
    if what == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif what == "cut":
        del content[at:]
    elif what == "longer":
        content += b"\0" * (1 + at % 7)
    else:
        content[at : at + 64] = content[at : at + 64][::-1]
    path.write_bytes(content)
    for name, right in zip(("llama", "qwen35"), written[1:], strict=True):
        engine = engine_on(load(name), folder, identity={"model": name})
        assert logits(engine, IDS[:300]) == right
        check_pages(engine.cache)
        engine.close()
    shutil.rmtree(folder.parent)


def test_a_full_disk_is_told_of_once(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine goes on; what is on the disk already stays."""
    model, problems = load("llama"), list[str]()
    engine = engine_on(model, folder, problems=problems)
    right, _ = answer(engine, IDS[:300])
    replace_file = os.replace

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("localkv.engine.disk_folder.os.replace", full)
    for start in (100, 200, 300):
        answer(engine, IDS[start : start + 300])
    engine.close()
    assert len(problems) == 1
    assert "No space left on device" in problems[0]
    assert not files_in(folder)
    assert not [*folder.rglob("*.part")]
    monkeypatch.setattr("localkv.engine.disk_folder.os.replace", replace_file)
    second = engine_on(model, folder)
    assert answer(second, IDS[:300]) == (right, 0)


def test_nobody_else_may_read_or_write(load: Load, folder: Path, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        engine = engine_on(load("llama"), folder)
        answer(engine, IDS[:300])
        engine.close()
    finally:
        os.umask(old)
    for path in (folder, *folder.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(UsageError, match="others may write to this folder"):
        DiskFolder(open_to_all, 1 << 20)
    with pytest.raises(UsageError, match=r"Not a directory|File exists"):
        DiskFolder(files_in(folder)[0], 1 << 20)


def test_a_budget_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--kv-budget"):
        disk_folder(folder, 1 << 20, has_budget=True)
    assert not folder.exists()


def taken(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files_in(folder))


def test_the_limit_holds_for_all_who_share_a_folder(folder: Path) -> None:
    """Two writers at the same time."""
    most, worst = 40 * 4096, list[int]()
    folders = [DiskFolder(folder, most) for _ in range(2)]
    group = "0" * 32

    def write(number: int) -> None:
        for i in range(60):
            name = f"{i:032x}-{number:032x}.rows0p0"
            folders[number].write(group, name, 5000, lambda file: file.write(b"x" * 5000) and None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        worst.append(folders[0].n_bytes)
    assert max(worst) <= most
    assert 15 * 4096 < taken(folder) <= most
    assert folders[0].n_bytes == taken(folder)
    assert folders[0].write(group, f"{99:032x}-{9:032x}.rows0p0", most + 1, lambda file: None) == 0


def test_a_smaller_limit_holds_at_once(folder: Path) -> None:
    """And what a killed process has left is cleared."""
    first = DiskFolder(folder, 1 << 20)
    for i in range(20):
        first.write(
            "1" * 32, f"{i:032x}-{i:032x}.states", 4096, lambda file: file.write(b"y") and None
        )
    first.use([first.path_of("1" * 32, f"{0:032x}-{0:032x}.states")])
    shard = next(path for path in folder.rglob("00") if path.is_dir())
    (shard / f"{77:032x}-{0:032x}.states.part").write_bytes(b"z" * 9999)
    (folder / "lock").write_bytes(b"garbage")
    second = DiskFolder(folder, 8 * 4096)
    assert second.n_bytes == taken(folder) <= 8 * 4096
    assert not [*folder.rglob("*.part")]
    kept = {int(path.name[:32], 16) for path in files_in(folder)}
    assert kept == {0, *range(21 - len(kept), 20)}  # 0 was of use again


WRITES = """
import sys
from localkv.engine.disk_folder import DiskFolder

folder = DiskFolder(sys.argv[1], 60 * 8192)
print("ready", flush=True)
for i in range(1 << 20):
    byte = bytes([i % 256])
    def write(file):
        for _ in range(7):
            file.write(byte * 1000)
            file.flush()
    folder.write("2" * 32, f"{i:032x}-{i:032x}.rows0p0", 7000, write)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(folder: Path) -> None:
    """Killed at any moment; and the next one counts what is there."""
    for number in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITES, str(folder)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            end = time.monotonic() + 20
            while not any(len(path.suffixes) == 1 for path in files_in(folder)):
                assert time.monotonic() < end
            time.sleep(0.005 + 0.013 * number)
            process.kill()
        for path in files_in(folder):
            if not path.name.endswith(".part"):
                content = path.read_bytes()
                assert content == bytes([int(path.name[:32], 16) % 256]) * 7000
        assert DiskFolder(folder, 60 * 8192).n_bytes == taken(folder) <= 60 * 8192
        assert not [*folder.rglob("*.part")]
    assert files_in(folder)
