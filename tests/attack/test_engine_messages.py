"""What a damaged engine may send: one error each, no traceback and nobody who waits for ever."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localkv.chat import engine_process
from localkv.chat.engine import (
    ChatRequest,
    EngineOptions,
    EngineStoppedError,
    Finished,
    LoadProgress,
    TextDelta,
)
from localkv.chat.engine_process import EngineProcess
from localkv.chat.wire import Failure, TokenCount, decode, encode
from localkv.errors import LocalKVError, UsageError
from support.fake_engine import FACTS

DONE = Finished("stop", 5, 7, 3, 0.1, 0.2, 35.0, 42)
SOUND = [FACTS, DONE, TextDelta("a", (0.1,), 3), LoadProgress("weights", 1, 2), TokenCount(4)]
WRONG = [None, True, -1, 1 << 70, 1.5, "text", [], [1, "a"], {}, {"a": 1}, [[]], "\ud800"]

N_MUTATIONS = 3000
N_MUTATIONS_LONG = 300_000


def engine_that_says(
    tmp_path: Path, lines: bytes, *, then: str = "sys.stdin.read()"
) -> EngineProcess:
    """A child that reads one line, and says these."""
    said = tmp_path / "said"
    said.write_bytes(lines)
    program = f"""
import sys
sys.stdin.readline()
sys.stdout.buffer.write(open({str(said)!r}, "rb").read())
sys.stdout.flush()
{then}
"""
    return EngineProcess(EngineOptions("m.gguf"), command=[sys.executable, "-c", program])


def is_gone(engine: EngineProcess) -> bool:
    return engine._process is not None and engine._process.poll() is not None


LINES = {
    "no JSON": b"hello\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "empty": b"\n",
    "a number": b"5\n",
    "nested": b"[" * 100_000 + b"\n",
    "nested in a field": b'{"type":"EngineFacts","name":' + b"[" * 100_000 + b"\n",
    "a type of another kind": b'{"type":[]}\n',
    "no such type": b'{"type":"Popen"}\n',
    "fields missing": b'{"type":"EngineFacts"}\n',
    "fields that are unknown": b'{"type":"Cancel","x":1}\n',
    "something else": encode(DONE),
    "a request": encode(ChatRequest(())),
    "a request without params": b'{"type":"ChatRequest","params":3}\n',
    "a stage that is none": b'{"type":"LoadProgress","stage":"lunch"}\n',
    "a number that is none": b'{"type":"LoadProgress","stage":"weights","done":NaN}\n',
    "a long number": b'{"type":"LoadProgress","stage":"weights","done":' + b"9" * 9999 + b"}\n",
    "a failure of another kind": b'{"type":"Failure","kind":"x","message":5,"hint":null}\n',
}


@pytest.mark.parametrize("name", LINES)
def test_a_damaged_line_ends_the_engine_with_one_error(tmp_path: Path, name: str) -> None:
    engine = engine_that_says(tmp_path, LINES[name])
    with pytest.raises(EngineStoppedError) as raised:
        engine.load(lambda progress: None)
    assert raised.value.message == "the engine was stopped: it sent something that is not a message"
    assert is_gone(engine)
    with pytest.raises(EngineStoppedError):
        engine.count_tokens(ChatRequest(()))
    engine.close()


def test_a_line_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "LONGEST_LINE", 1 << 16)
    engine = engine_that_says(tmp_path, b"x", then="while True: print('x' * 1000, end='')")
    with pytest.raises(EngineStoppedError, match="is not a message"):
        engine.load(lambda progress: None)
    assert is_gone(engine)
    engine.close()


@pytest.mark.parametrize("line", [encode(TokenCount(1)), encode(FACTS), b"{}\n", b'{"type":"Text'])
def test_a_damaged_answer_ends_it(tmp_path: Path, line: bytes) -> None:
    said = encode(FACTS) + encode(TextDelta("Once", (0.1,), 3)) + line
    engine = engine_that_says(tmp_path, said, then="")
    engine.load(lambda progress: None)
    told = []
    with pytest.raises(EngineStoppedError):
        told.extend(_texts(engine))
    engine.close()


def _texts(engine: EngineProcess) -> list[str]:
    texts = []
    for news in engine.answer(ChatRequest([{"role": "user", "content": "Hi"}])):
        assert isinstance(news, TextDelta)
        texts.append(news.text)
    return texts


def mutated(dice: random.Random) -> bytes:
    """A message with one damage."""
    value = dice.choice(SOUND)
    fields: dict[str, Any] = {"type": type(value).__name__, **asdict(value)}
    kind = dice.randrange(4)
    name = dice.choice(list(fields))
    if kind == 0:
        fields[name] = dice.choice(WRONG)
    elif kind == 1:
        del fields[name]
    elif kind == 2:
        fields[name + "x"] = 1
    line = bytearray(json.dumps(fields).encode())
    if kind == 3:
        for _ in range(dice.randrange(1, 4)):
            line[dice.randrange(len(line))] = dice.randrange(256)
    return bytes(line) + b"\n"


def check_mutations(seeds: range) -> int:
    """How many are refused; the rest has the types that it is declared with."""
    n_refused = 0
    for seed in seeds:
        try:
            value = decode(mutated(random.Random(seed)))
        except (ValueError, UsageError):
            n_refused += 1
            continue
        assert decode(encode(value)) == value
        if isinstance(value, TextDelta):
            assert isinstance(value.text, str)
            assert all(isinstance(second, int | float) for second in value.seconds)
        elif isinstance(value, Failure):
            assert isinstance(value.error(), LocalKVError)
    return n_refused


def test_mutated_messages() -> None:
    assert check_mutations(range(N_MUTATIONS)) > N_MUTATIONS // 2


@pytest.mark.attack
def test_mutated_messages_often() -> None:
    assert check_mutations(range(N_MUTATIONS, N_MUTATIONS_LONG)) > N_MUTATIONS_LONG // 2


def test_a_child_that_reads_nonsense_ends() -> None:
    """The other direction: a parent that was damaged leaves no child behind."""
    for line in (b"", b"nonsense\n", b'{"type":"Cancel"}\n', b"[" * 50_000 + b"\n"):
        done = subprocess.run(
            [sys.executable, "-m", "localkv.chat.engine_child"],
            input=line,
            capture_output=True,
            timeout=60,
        )
        assert done.stdout == b""
        assert done.returncode != 0


def test_a_child_ends_whose_listener_failed() -> None:
    program = """
import sys, time
from localkv.chat import engine_child
class Slow:
    def __init__(self, options): pass
    def load(self, on_progress): time.sleep(60)
engine_child.LocalEngine = Slow
engine_child.main()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(encode(EngineOptions("m.gguf")) + b"nonsense\n")
        process.stdin.flush()  # and it stays open
        assert process.wait(timeout=40) == 0


def test_nobody_waits_for_a_thread_that_failed() -> None:
    from localkv.tui.engine_driver import AnswerFailed, EngineDriver, EngineFailed

    class Broken:
        def load(self, on_progress: object) -> None:
            raise ZeroDivisionError("oh")

        def answer(self, request: object) -> None:
            raise AssertionError

        def close(self) -> None:
            pass

    told: list[Any] = []
    heard = threading.Semaphore(0)

    def post(message: object) -> None:
        told.append(message)
        heard.release()

    driver = EngineDriver(Broken(), post)  # type: ignore[arg-type]
    driver.load()
    driver.answer(ChatRequest(()))
    assert all(heard.acquire(timeout=20) for _ in range(2))
    assert [type(message) for message in told] == [EngineFailed, AnswerFailed]
    assert str(told[0].error) == "ZeroDivisionError: oh (a bug: please report it)"
    driver.close()
