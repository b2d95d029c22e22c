"""What a damaged engine may send: one error each, no traceback and nobody who waits for ever."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localkv.chat.engine import (
    ChatRequest,
    EngineOptions,
    EngineStoppedError,
    Finished,
    LoadProgress,
    TextDelta,
)
from localkv.engine_process import client
from localkv.engine_process.client import EngineProcess
from localkv.engine_process.wire import (
    LENGTH,
    Ask,
    Cancel,
    Failed,
    Load,
    Progress,
    Refused,
    Told,
    framed,
    from_conversation,
    named_error,
)
from localkv.errors import LocalKVError
from support.fake_engine import FACTS

DONE = Told(1, finished=Finished("stop", 5, 7, 3, 0.1, 0.2, 35.0, 42))
GREW = Told(1, delta=TextDelta("a", (0.1,), 3))
SOUND = [
    Told(facts=FACTS),
    DONE,
    GREW,
    Progress(LoadProgress("weights", 1, 2)),
    Told(1, n_tokens=4),
    Failed("broken", None, 1),
    Refused(1, "UsageError", "wrong", "right"),
]
WRONG = [None, True, -1, 1 << 63, 1.5, "text", [], [1, "a"], {}, {"a": 1}, [[]], b"\xff"]

N_MUTATIONS = 3000
N_MUTATIONS_LONG = 300_000


def engine_that_says(
    tmp_path: Path, data: bytes, *, then: str = "sys.stdin.read()"
) -> EngineProcess:
    """A child that reads four bytes, and says these."""
    said = tmp_path / "said"
    said.write_bytes(data)
    program = f"""
import sys
sys.stdin.buffer.read(4)
sys.stdout.buffer.write(open({str(said)!r}, "rb").read())
sys.stdout.flush()
{then}
"""
    return EngineProcess(EngineOptions("m.gguf"), command=[sys.executable, "-c", program])


def is_gone(engine: EngineProcess) -> bool:
    return engine._process is not None and engine._process.returncode is not None


def body(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def packed(fields: object) -> bytes:
    return body(msgspec.msgpack.encode(fields))


BODIES = {
    "no message": body(b"hello"),
    "not UTF-8": body(b"\xa3\xff\xfe\x00"),
    "empty": body(b""),
    "a number": body(b"5"),
    "nested": body(b"\x91" * 100_000),
    "nested in a field": body(b"\x82\xa4type\xa4Told\xa5facts" + b"\x91" * 100_000),
    "nested JSON": body(b'{"type":' + b"[" * 100_000),
    "a type of another kind": packed({"type": []}),
    "no such type": packed({"type": "Popen"}),
    "fields missing": packed({"type": "Told", "facts": {}}),
    "facts without fields": packed({"type": "Told", "facts": 5}),
    "something else": framed(DONE),
    "a request": framed(Ask(1, "answer", ChatRequest(()))),
    "a stage that is none": packed({"type": "Progress", "value": {"stage": "lunch"}}),
    "a number that is none": packed(
        {"type": "Progress", "value": {"stage": "weights", "done": ""}}
    ),
    "a failure of another kind": packed({"type": "Failed", "message": 5, "hint": None}),
    "a length that is too long": LENGTH.pack(0xFFFFFFFF),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_damaged_message_ends_the_engine_with_one_error(tmp_path: Path, name: str) -> None:
    engine = engine_that_says(tmp_path, BODIES[name])
    with pytest.raises(EngineStoppedError) as raised:
        engine.load(lambda progress: None)
    assert raised.value.message == "the engine was stopped: it sent something that is not a message"
    assert is_gone(engine)
    with pytest.raises(EngineStoppedError):
        engine.count_tokens(ChatRequest(()))
    engine.close()


def test_a_message_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST", 1 << 16)
    then = "while True: print('x' * 1000, end='')"
    engine = engine_that_says(tmp_path, LENGTH.pack(1 << 17), then=then)
    with pytest.raises(EngineStoppedError, match="is not a message"):
        engine.load(lambda progress: None)
    assert is_gone(engine)
    engine.close()


@pytest.mark.parametrize(
    "data", [framed(Told(1, n_tokens=1)), framed(Told(facts=FACTS)), body(b"{}"), framed(DONE)[:9]]
)
def test_a_damaged_answer_ends_it(tmp_path: Path, data: bytes) -> None:
    said = framed(Told(facts=FACTS)) + framed(GREW) + data
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
    whole = msgspec.to_builtins(dice.choice(SOUND))
    fields: dict[str, Any] = whole
    inner = [value for value in whole.values() if isinstance(value, dict)]
    if inner and dice.random() < 0.7:
        fields = inner[0]
    kind = dice.randrange(3)
    name = dice.choice(list(fields))
    if kind == 0:
        fields[name] = dice.choice(WRONG)
    elif kind == 1:
        del fields[name]
    data = bytearray(msgspec.msgpack.encode(whole))
    if kind == 2:
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


def check_mutations(seeds: range) -> int:
    """How many are refused; the rest has the types that it is declared with."""
    n_refused = 0
    for seed in seeds:
        try:
            message = from_conversation(mutated(random.Random(seed)))
        except ValueError:
            n_refused += 1
            continue
        assert from_conversation(framed(message)[LENGTH.size :]) == message
        if isinstance(message, Told) and message.delta is not None:
            assert isinstance(message.delta.text, str)
            assert all(isinstance(second, int | float) for second in message.delta.seconds)
        elif isinstance(message, Refused):
            told = named_error(message.kind, message.message, message.hint)
            assert isinstance(told, LocalKVError)
    return n_refused


def test_mutated_messages() -> None:
    assert check_mutations(range(N_MUTATIONS)) > N_MUTATIONS // 2


@pytest.mark.attack
def test_mutated_messages_often() -> None:
    assert check_mutations(range(N_MUTATIONS, N_MUTATIONS_LONG)) > N_MUTATIONS_LONG // 2


def test_a_child_that_reads_nonsense_ends() -> None:
    """The other direction: a parent that was damaged leaves no child behind."""
    for data in (b"", b"nonsense", body(b"nonsense"), framed(Cancel(1)), body(b"\x91" * 50_000)):
        done = subprocess.run(
            [sys.executable, "-m", "localkv.engine_process.child"],
            input=data,
            capture_output=True,
            timeout=60,
        )
        assert done.stdout == b""
        assert done.returncode != 0


def test_a_child_ends_whose_listener_failed() -> None:
    program = """
import sys, time
from localkv.engine_process import child, conversation
class Slow:
    def __init__(self, options): pass
    def load(self, on_progress): time.sleep(60)
conversation.LocalEngine = Slow
child.main()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        load = Load(EngineOptions("m.gguf"), converses=True)
        process.stdin.write(framed(load) + body(b"nonsense"))
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
