"""A model file that shrinks, is written to or is replaced while it is in use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localkv.chat.engine import ChatRequest, EngineOptions, EngineStoppedError
from localkv.engine_process.client import EngineProcess
from localkv.errors import ModelFileError
from localkv.loader.gguf_file import open_gguf
from localkv.sampling.params import SamplingParams
from support.program import clean_env, localkv_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS as Linux sends it")

SHRANK = "the file shrank while it was in use, or its disk fails"
CHANGED = "the file was changed while it was in use"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model, tmp_path / "model.gguf"))


def overwrite(path: Path) -> None:
    """Write to a file in place, as cp does, a moment after it was opened."""
    time.sleep(0.02)  # of a file system's clock
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)


HARMFUL = {
    "truncated": lambda path: os.truncate(path, 10_000),
    "extended": lambda path: os.truncate(path, 10_000_000),
    "overwritten": overwrite,
    "copied over": lambda path: shutil.copyfile(path.with_name("other.gguf"), path),
}
HARMLESS = {
    "renamed over": lambda path: os.replace(path.with_name("other.gguf"), path),
    "removed": lambda path: path.unlink(),
    "moved": lambda path: path.rename(path.with_name("moved.gguf")),
    "linked": lambda path: path.with_name("link.gguf").hardlink_to(path),
    "mode": lambda path: path.chmod(0o600),
}


@pytest.mark.parametrize("way", [*HARMFUL, *HARMLESS])
def test_a_change_is_seen_before_it_does_harm(way: str, model: Path) -> None:
    from localkv.llm import LLM

    llm = LLM(model, n_ctx=64)
    before = llm.complete("The fox", max_tokens=8, temperature=0).text
    data = bytearray(model.read_bytes())
    data[-5000:] = bytes(5000)
    time.sleep(0.02)
    model.with_name("other.gguf").write_bytes(data)
    {**HARMFUL, **HARMLESS}[way](model)
    if way in HARMLESS:
        assert llm.complete("The fox", max_tokens=8, temperature=0).text == before
        return
    for use in (
        lambda: llm.complete("The fox", max_tokens=8),
        lambda: llm.complete([3]),
        lambda: llm.logits([1, 2, 3]),
        lambda: llm.engine.evaluate([1, 2]),
        lambda: next(llm.engine.logit_batches([1, 2])),
    ):
        with pytest.raises(ModelFileError) as caught:
            use()
        assert caught.value.message == f"{model}: {CHANGED}"


def test_a_change_while_it_is_loaded_is_seen(model: Path) -> None:
    from localkv.llm import LLM

    def change(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("weights", 1):
            overwrite(model)

    with pytest.raises(ModelFileError, match=CHANGED):
        LLM(model, n_ctx=64, on_progress=change)


def test_a_part_of_a_split_model_counts(model: Path) -> None:
    first = model.with_name("m-00001-of-00002.gguf")
    second = model.with_name("m-00002-of-00002.gguf")
    from support.gguf_bytes import U16, Tensor, gguf_bytes

    for number, path in enumerate((first, second)):
        keys = [("split.count", U16, 2), ("split.no", U16, number)]
        path.write_bytes(gguf_bytes(keys, [Tensor(f"t{number}", (8,), 0, bytes(32))]).data)
    opened = open_gguf(first)
    opened.check_unchanged()
    overwrite(second)
    with pytest.raises(ModelFileError, match="00002-of-00002"):
        opened.check_unchanged()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["-t", "2"], ["--device", "reference"]], ids=["threads", "reference"]
)
def test_complete_ends_with_a_line(options: list[str], model: Path) -> None:
    """The text up to there is kept, and nothing but the line is said of the end."""
    argv = ["complete", "-q", "-m", model, "-p", "The fox", "-c", "200000", "--ignore-eos"]
    with localkv_process(*argv, *options, stdin=subprocess.DEVNULL) as process:
        first = process.stdout.read(1)
        os.truncate(model, 0)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert first + out
    assert err.decode().splitlines()[-1] == f"error: {model}: {SHRANK}"
    assert b"Traceback" not in err


@pytest.mark.slow
def test_chat_says_it(model: Path) -> None:
    engine = EngineProcess(EngineOptions(str(model), {"n_ctx": 4096}))
    try:
        engine.load(lambda progress: None)
        request = ChatRequest(
            ({"role": "user", "content": "fox"},),
            SamplingParams(seed=1),
            max_tokens=4000,
            ignore_eos=True,
        )
        with pytest.raises(EngineStoppedError) as caught:  # noqa: PT012
            for number, _ in enumerate(engine.answer(request)):
                if number == 1:
                    os.truncate(model, 0)
        assert caught.value.hint == f"{model}: {SHRANK}"
    finally:
        engine.close()


def child(code: str, *args: object) -> tuple[int, str]:
    """The exit code and stderr of a program."""
    begin = "import mmap, os, signal, sys, threading\nfrom localkv.system import bus_errors\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code, *map(str, args)],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


HEADER = """
from localkv.loader.gguf_file import open_gguf
bus_errors.end_cleanly()
opened = open_gguf(sys.argv[1])
os.truncate(sys.argv[1], 0)
opened.metadata.strings("tokenizer.ggml.tokens")
"""


def test_a_header_that_goes_away_under_a_light_command(model: Path) -> None:
    assert child(HEADER, model) == (1, f"error: {model}: {SHRANK}\n")


HANDLER = """
bus_errors.end_cleanly()
if sys.argv[2] == "native":
    bus_errors.end_cleanly_from_threads()
def mapped(name):
    with open(name, "wb") as file:
        file.write(bytes(40000))
    with open(name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
ours, foreign = (mapped(sys.argv[1] + end) for end in ("a", "b"))
bus_errors.watch(ours, "ours")
gone = mapped(sys.argv[1] + "c")
bus_errors.watch(gone, "gone")
del gone
"""
READ_OURS = "os.truncate(sys.argv[1] + 'a', 10)\nours[39000]\n"
READ_FOREIGN = "os.truncate(sys.argv[1] + 'b', 10)\nforeign[39000]\n"


@pytest.mark.parametrize("kind", ["python", "native"])
def test_what_the_handler_takes_for_ours(kind: str, tmp_path: Path) -> None:
    def ends(code: str) -> tuple[int, str]:
        return child(HANDLER + code, tmp_path / "map", kind)

    assert ends("ours[39000]") == (0, "")
    assert ends(READ_OURS) == (1, f"error: ours: {SHRANK}\n")
    in_thread = (
        "thread = threading.Thread(target=lambda: ours[39000])\nthread.start()\nthread.join()"
    )
    assert ends("os.truncate(sys.argv[1] + 'a', 10)\n" + in_thread)[0] == 1
    assert ends(READ_FOREIGN) == (-signal.SIGBUS, "")
    assert ends("os.kill(os.getpid(), signal.SIGBUS)") == (-signal.SIGBUS, "")


@pytest.mark.parametrize("kind", ["python", "native"])
def test_the_former_handler_gets_the_rest(kind: str, tmp_path: Path) -> None:
    code = "import faulthandler\nfaulthandler.enable()\n" + HANDLER + READ_FOREIGN
    ended, err = child(code, tmp_path / "map", kind)
    assert ended == -signal.SIGBUS
    assert err.startswith("Fatal Python error: Bus error")


def test_a_process_that_imports_localkv_keeps_its_signals(model: Path) -> None:
    code = HEADER.replace("bus_errors.end_cleanly()\n", "")
    assert child(code, model) == (-signal.SIGBUS, "")
