"""What models, files, hubs and users say is shown on a terminal, and steers it in nothing."""

from __future__ import annotations

import fcntl
import io
import json
import os
import random
import re
import select
import struct
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

from localkv.cli import COMMANDS
from localkv.commands.output import OwnText, Terminal, guarded
from localkv.system.terminal_text import visible, without_controls
from support.attack.hostile_texts import (
    EVERYTHING,
    ORDERS,
    OWN,
    random_text,
    steering,
    write_hostile_model,
)
from support.fake_hub import FakeHub
from support.paths import ROOT
from support.program import clean_env, localkv_process

FAST_SEEDS, LONG_SEEDS = 300, 100_000

PATIENCE = 120.0
"""Seconds after which a program that shows nothing more hangs."""

NAME = "mo\x1b]0;stolen\x07\x9b35m\u202e.gguf"
WIDE_OWN = re.compile(OWN.pattern + rb"|\x1b\[\?25[lh]|\r|\x1b\[2K|\x1b\[1A|\x1b\[38;5;\d+m")
"""A bar hides the cursor and goes up a line, too."""


class Folder:
    """A folder with models, prompts and templates that hold orders, and what runs in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "models").mkdir()
        self.model = write_hostile_model(path / "models" / NAME)
        self.unknown = write_hostile_model(path / f"un{NAME}", architecture="ll\x1b[35;46;9m\x9b")
        self.prompt = path / f"prompt{EVERYTHING[:20]}.txt"
        self.prompt.write_text(EVERYTHING + "\n\n" + "The fox said hello to the owl. " * 40)
        self.template = path / "template.jinja"
        self.template.write_text("{{ raise_exception('" + ORDERS[2] + "\x9b2J') }}")
        self.checkpoint = path / f"checkpoint{NAME}"
        self.checkpoint.mkdir()
        config = {"architectures": [ORDERS[2] + "\x9b2J"]}
        (self.checkpoint / "config.json").write_text(json.dumps(config))
        self.env: dict[str, str] = {
            "HF_HOME": str(path / "hf"),
            "TERM": "xterm-256color",
            "COLUMNS": "100",
            "LOCALKV_CACHE_TYPE_V": "f16",
        }

    def shown(
        self, *argv: object, code: int | None = 0, keys: Sequence[tuple[bytes, bytes]] = ()
    ) -> bytes:
        """All that a command sends to its terminal.

        Args:
            keys: what is typed once a text is shown, one after the other.
        """
        import pty

        ours, theirs = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        env = clean_env(**self.env)
        waiting = list(keys)
        sent, seen = b"", 0
        with localkv_process(*argv, **streams, env=env, cwd=self.path) as process:
            os.close(theirs)
            while select.select([ours], [], [], PATIENCE)[0]:
                try:
                    part = os.read(ours, 1 << 16)
                except OSError:  # Linux's way to say that the other end is closed
                    break
                sent += part
                if waiting and waiting[0][0] in sent[seen:]:
                    seen = len(sent)
                    os.write(ours, waiting.pop(0)[1])
            else:
                raise AssertionError(f"it does not go on after {sent[-200:]!r}")
        os.close(ours)
        assert code is None or process.returncode == code, sent
        assert not waiting
        return sent

    def piped(self, *argv: object) -> tuple[bytes, bytes]:
        with localkv_process(*argv, env=clean_env(**self.env), cwd=self.path) as process:
            return process.communicate(b"", timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("hostile"))


RUNS: dict[str, list[tuple[list[str], int | None]]] = {
    "complete": [
        (["-m", "MODEL", "-p", "hello", "-n", "60", "--seed", "7", "--temp", "5", "-v"], 0),
        (["-m", "MODEL", "-f", "PROMPT", "--chat", "--chat-template-file", "TEMPLATE"], 1),
        (["-m", "UNKNOWN", "-p", "hello"], 1),
        (["-m", NAME + "x", "-p", "hello"], None),
    ],
    "perplexity": [
        (["-m", "MODEL", "-f", "PROMPT", "-c", "32"], 0),
        (["-m", "MODEL", "-f", NAME], 2),
    ],
    "imatrix": [
        (["-m", "MODEL", "-f", "PROMPT", "-c", "32", "-o", ORDERS[2]], None),
        (["-m", "UNKNOWN", "-f", "PROMPT"], 1),
        (["-m", "MODEL", "-f", NAME], 2),
        (["--in-file", "UNKNOWN", "--show-statistics"], None),
    ],
    "calibrate": [(["-m", NAME + "x"], None), (["-m", "MODEL", "-f", NAME], 2)],
    "embed": [
        (["-m", "MODEL", "-f", "PROMPT", "--json"], None),
        (["-m", "MODEL", "-p", EVERYTHING.replace("\0", "")], 0),
        (["-m", "UNKNOWN", "-p", "hello"], 1),
    ],
    "rerank": [
        (["-m", "MODEL", "--query", EVERYTHING.replace("\0", ""), "-f", "PROMPT"], None),
        (["-m", "UNKNOWN", "--query", "hello", "-p", "hello"], 1),
    ],
    "bench": [(["-m", "MODEL", "-p", "8", "-n", "2", "-r", "1"], 0), (["-m", NAME], 1)],
    "quantize": [
        (["MODEL", "out.gguf", "F16"], 0),
        (["--dry-run", "MODEL", "Q4_0"], 0),
        (["MODEL", NAME, NAME], 2),
        (["UNKNOWN", "F16"], None),
    ],
    "convert": [(["CHECKPOINT"], 1), (["MODEL"], 2), ([NAME], 2)],
    "plan": [(["-m", "MODEL"], 0), (["-m", "UNKNOWN"], 1)],
    "show": [
        (["-m", "MODEL"], 0),
        (["-m", "MODEL", "--json"], 0),
        (["-m", "MODEL", "--template"], 0),
        (["-m", "UNKNOWN"], 0),
    ],
    "tokenize": [(["-m", "MODEL", "-p", EVERYTHING.replace("\0", "")], 0)],
    "detokenize": [(["-m", "MODEL", *map(str, range(380))], 0)],
    "list": [([], 0), (["-q"], 0), (["--json"], 0)],
    "rm": [([f"org/{ORDERS[2]}"], None), (["MODEL"], 2)],
    "pull": [([f"org/{ORDERS[2]}"], None)],
    "doctor": [([], None)],
    "serve": [
        (["-m", "UNKNOWN", "--port", "0"], 1),
        (["-m", "MODEL", "--host", "0.0.0.0"], 2),
        (["-m", "MODEL", "--print-config", "claude"], 0),
    ],
    "chat": [(["-m", "UNKNOWN", "--cache-type-k", ORDERS[2]], 2)],
}
"""Command -> what it is run with, and the exit code; None where any will do."""

HEAVY = ("complete", "perplexity", "embed", "bench", "doctor")


def test_every_command_is_tried() -> None:
    assert set(RUNS) == set(COMMANDS)


def filled(folder: Folder, words: list[str]) -> list[object]:
    places: dict[str, object] = {
        "MODEL": folder.model,
        "UNKNOWN": folder.unknown,
        "PROMPT": folder.prompt,
        "TEMPLATE": folder.template,
        "CHECKPOINT": folder.checkpoint,
    }
    return [places.get(word, word) for word in words]


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[pytest.mark.slow] * (c in HEAVY)) for c in RUNS]
)
def test_no_order_reaches_the_terminal(folder: Folder, command: str) -> None:
    seen = b""
    for words, code in RUNS[command]:
        shown = folder.shown(command, *filled(folder, words), code=code)
        assert steering(shown) == []
        seen += shown
    if command != "doctor":  # which speaks of the machine only
        assert re.search(rb"\\x1b|\xe2\x90\x9b|\\u001b", seen), "no order was there to be shown"


def test_errors_of_the_command_line(folder: Folder) -> None:
    text = EVERYTHING.replace("\0", "")
    for words in (
        ["show", f"--{text}"],
        [text],
        ["complete", "-m", text, "-n", text],
        ["--" + text],
    ):
        shown = folder.shown(*words, code=None)
        assert steering(shown) == []
        assert b"\\x1b" in shown


@pytest.mark.slow
def test_a_configuration_that_holds_orders(folder: Folder, tmp_path: Path) -> None:
    config = tmp_path / f"{ORDERS[1]}.toml"
    config.write_text(f"[show]\n{json.dumps(ORDERS[2])} = 1\n")
    folder.env["LOCALKV_CONFIG"] = str(config)
    try:
        for command in ("show", "doctor"):
            shown = folder.shown(command, code=None)
            assert steering(shown) == []
            assert b"\\x1b" in shown
    finally:
        del folder.env["LOCALKV_CONFIG"]


@pytest.mark.slow
def test_a_hub_that_says_orders(folder: Folder) -> None:
    data = folder.model.read_bytes()
    hub = FakeHub(repos={"org/repo": {"model-Q8_0.gguf": data, "other-F16.gguf": data}})
    with hub.running():
        folder.env["HF_ENDPOINT"] = hub.url
        try:
            shown = folder.shown("pull", "org/repo:Q8_0", code=None)
            assert b"model-Q8_0.gguf" in shown
            assert steering(shown, own=WIDE_OWN) == []
            shown = folder.shown("list")
            assert b"org/repo:Q8_0" in shown
            assert steering(shown) == []
            hub.announced["other-F16.gguf"] = f"o{ORDERS[2]}\x9b-F16.gguf"
            for words in (["org/repo:F16"], ["org/repo:F16\x1b[35;46;9m"], ["org/repo:BF16"]):
                shown = folder.shown("pull", *words, code=None)
                assert steering(shown, own=WIDE_OWN) == []
            shown = folder.shown("rm", "org/repo", "--yes", code=None)
            assert steering(shown) == []
        finally:
            del folder.env["HF_ENDPOINT"]


@pytest.mark.parametrize(
    "words",
    [["detokenize", "-m", "MODEL", "266", "265", "279"], ["show", "-m", "MODEL", "--template"]],
)
def test_pipes_get_every_byte_and_so_does_raw(folder: Folder, words: list[str]) -> None:
    argv = filled(folder, words)
    out, err = folder.piped(*argv)
    assert not err
    assert b"\x1b]52;c;ZXZpbA==\x07" in out
    assert folder.piped(*argv, "--raw") == (out, b"")
    raw = folder.shown(*argv, "--raw")
    assert raw == out.replace(b"\n", b"\r\n")
    assert folder.shown(*argv) == visible(out.decode()).encode().replace(b"\n", b"\r\n")


@pytest.mark.slow
def test_text_of_a_model_in_a_pipe_and_on_a_terminal(folder: Folder) -> None:
    argv = [
        "complete",
        "-m",
        folder.model,
        "-p",
        "x",
        "-n",
        "80",
        "--seed",
        "3",
        "--temp",
        "5",
        "-q",
    ]
    out, _ = folder.piped(*argv)
    assert re.search(rb"\x1b\[|\x9b", out)
    shown = folder.shown(*argv)
    ended = out.decode().replace("\r\n", "\n")
    assert shown == visible(ended).encode().replace(b"\n", b"\r\n")
    by_name = folder.shown(*argv, "-o", "/dev/tty", code=None)
    assert steering(by_name) == []


@pytest.mark.slow
def test_the_chat_on_a_terminal(folder: Folder) -> None:
    """Textual sends orders of its own there, so what is looked for is what the model says."""
    sessions = folder.path / f"chats{ORDERS[1]}.sqlite3"
    shown = folder.shown(
        *("chat", "-m", folder.model, "-n", "80", "--seed", "3", "--temp", "5"),
        *("--sessions", sessions, "-sys", ORDERS[1]),
        keys=[(b"lists commands", b"hello\r"), (b"prompt tokens reused", b"\x11")],
    )
    text = shown.decode("utf-8", errors="replace")
    for order in ORDERS:
        if order not in ("\x00",):
            assert order not in text, repr(order)
    text = re.sub("\x1b\\]22;[a-z]+\x07", "", text)  # the shape of the mouse
    assert not re.search("\x1b\\][0-9]|[\x80-\x9f]|\u202e|[\x05\x0e\x7f]", text)


# --- Terminal itself


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def check_pieces(n_seeds: int) -> None:
    n_steering = 0
    for seed in range(n_seeds):
        rng = random.Random(seed)
        whole = random_text(rng) + "\n"
        cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(9)))
        screen = Screen()
        terminal = guarded(screen)
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            assert terminal.write(whole[start:end]) == end - start
        assert screen.getvalue() == visible(whole.replace("\r\n", "\n"))
        assert steering(screen.getvalue().encode(), own=re.compile(b"(?!)")) == []
        assert not without_controls(screen.getvalue()).count("\x1b")
        n_steering += visible(whole) != whole
    assert n_steering > n_seeds // 3


def test_an_order_in_pieces_is_no_order() -> None:
    check_pieces(FAST_SEEDS)


@pytest.mark.attack
def test_many_orders_in_pieces() -> None:
    check_pieces(LONG_SEEDS)


def test_every_character_alone() -> None:
    controls = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    for code in range(0x3000):
        shown = visible(chr(code))
        steers = code in controls and chr(code) not in "\n\t"
        assert (shown != chr(code)) == steers
        assert shown.isprintable() or not steers
        assert (without_controls(chr(code)) == "") == (code in controls)


def test_what_is_ours_may_steer() -> None:
    screen = Screen()
    terminal = guarded(screen)
    print(OwnText("\x1b[32mgreen\x1b[0m") + "\x1b[31mred", file=terminal)
    terminal.writelines(["a\r", "b\r", "\n"])
    assert screen.getvalue() == "\x1b[32mgreen\x1b[0m␛[31mred\na␍b\n"
    terminal.write("c\r")
    terminal.write(OwnText("\r\x1b[K"))
    assert screen.getvalue().endswith("c␍\r\x1b[K")


def test_nothing_gets_past_it() -> None:
    terminal = Terminal(io.TextIOWrapper(io.BytesIO()))
    for name in ("buffer", "detach"):
        assert not hasattr(terminal, name)
    pipe = io.StringIO()
    assert guarded(pipe) is pipe
    around = re.compile(r"__std(out|err)__|std(out|err)\.buffer|unguarded\(")
    source = ROOT / "localkv"
    found = {
        path.name
        for path in (
            *source.glob("commands/**/*.py"),
            *source.glob("tui/**/*.py"),
            *source.glob("*.py"),
        )
        if around.search(path.read_text())
    }
    assert found <= {"output.py", "model_file.py"}


def test_the_folder_is_hostile(folder: Folder) -> None:
    """The model says what it is meant to, in all of its texts."""
    data = folder.model.read_bytes()
    for order in ORDERS:
        assert data.count(order.encode()) >= 5
