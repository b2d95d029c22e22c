"""What the system refuses: memory, threads, disk. And many at once, and settings out of hand."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from localkv.errors import LocalKVError
from localkv.system.limits import exhausted
from support.program import clean_env

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")

SHOW, COMPLETE = "show", "complete"
FAST_SIZES, SLOW_SIZES = (30, 60, 100, 150), (*range(24, 40, 2), 80, 120, 200, 300)
"""MiB of address space of commands that only read a header; Python alone takes nearly 20."""

MODEL_SIZES = (200, 400, 600, 800, 1000, 1100, 1300, 1600, 2000, 3000, 4000)
PROCESS_LIMITS = (0, 1, 2, 3, 4, 6, 20)


def argv(command: str, model: Path, n_tokens: int = 2) -> list[str]:
    if command == SHOW:
        return ["show", str(model)]
    prompt = ["-p", "The fox", "-n", str(n_tokens), "--temp", "0"]
    return ["complete", "-q", "-m", str(model), *prompt]


def run(
    command: Sequence[str],
    limits: Mapping[int, int] = {},
    variables: Mapping[str, str] = {},
    before: Sequence[str] = (),
) -> tuple[int, list[str], str]:
    """Exit code, lines of stderr, and stdout of a command under limits."""

    def limit() -> None:
        for number, most in limits.items():
            resource.setrlimit(number, (most, most))

    done = subprocess.run(
        [*before, sys.executable, "-m", "localkv", *command],
        env=clean_env(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=limit,
        timeout=550,
        check=False,
    )
    return done.returncode, done.stderr.decode(errors="replace").splitlines(), done.stdout.decode()


def check_answer_or_line(code: int, err: list[str], out: str) -> bool:
    """Whether it was an answer; otherwise it must be a line, with a hint at most."""
    if code == 0:
        assert out
        return True
    assert code == 1, (code, err)
    assert "Traceback" not in "\n".join(err)
    assert len(err) <= 2, err
    assert "a bug" not in err[-1]
    return False


@pytest.mark.slow
def test_little_memory_for_a_header(tiny_model: Path) -> None:
    answers = [
        check_answer_or_line(*run(argv(SHOW, tiny_model), {resource.RLIMIT_AS: size << 20}))
        for size in FAST_SIZES
    ]
    assert not answers[0]
    code, err, _ = run(argv(COMPLETE, tiny_model), {resource.RLIMIT_AS: 300 << 20})
    assert code == 1
    assert err[0].startswith("error: this process may map 300.00 MiB of memory (ulimit -v), ")


@pytest.mark.attack
def test_every_amount_of_memory(tiny_model: Path) -> None:
    for command, sizes in ((SHOW, SLOW_SIZES), (COMPLETE, MODEL_SIZES)):
        answers = [
            check_answer_or_line(*run(argv(command, tiny_model), {resource.RLIMIT_AS: size << 20}))
            for size in sizes
        ]
        assert answers[0] is False
        assert answers[-1] is True


_CAPABILITIES = "-all,+dac_override,+dac_read_search"
_NOBODY = [
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    *(
        "--inh-caps",
        _CAPABILITIES,
        "--ambient-caps",
        _CAPABILITIES,
        "--bounding-set",
        _CAPABILITIES,
    ),
]
"""Root is exempt from the limit on processes."""


@pytest.mark.attack
def test_no_further_threads(tiny_model: Path, tmp_path: Path) -> None:
    before: list[str] = []
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}
    (tmp_path / "cache").mkdir()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv to give up root with")
        before = _NOBODY
        os.chown(tmp_path / "cache", 65534, 65534)
    answers = []
    for limit in PROCESS_LIMITS:
        limits = {resource.RLIMIT_NPROC: limit}
        assert check_answer_or_line(*run(argv(SHOW, tiny_model), limits, cache, before))
        answers.append(
            check_answer_or_line(*run(argv(COMPLETE, tiny_model), limits, cache, before))
        )
    assert answers[0] is False
    assert answers[-1] is True


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "out of memory"),
        (RuntimeError("can't start new thread"), "no further threads"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "no further threads"),
        (ValueError("something else"), None),
        (LocalKVError("out of memory, as it says itself"), None),
    ],
)
def test_what_is_taken_for_a_limit(error: Exception, line: str | None) -> None:
    known = exhausted(error)
    assert (known is None) == (line is None)
    assert line is None or line in known.message
    outer = SystemError("outer")
    outer.__cause__ = error
    assert (exhausted(outer) is None) == (line is None)


# a file can't grow beyond so many bytes: to a program that is a full disk
FULL = {resource.RLIMIT_FSIZE: 100}


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kind in ("svg", "png"):
        path = tmp_path / f"plot.{kind}"
        path.write_text("before")
        code, err, _ = run(["plan", str(tiny_model), "--plot", str(path)], FULL)
        assert (code, err[-1]) == (1, f"error: {path}: File too large")
        assert path.read_text() == "before"
        code, _, _ = run(["plan", str(tiny_model), "--plot", str(path)])
        assert code == 0
        assert path.read_bytes() != b"before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plot.png", "plot.svg"]


EXPORT = """
import resource, signal, sys
from pathlib import Path
from localkv.chat import session
from localkv.errors import UsageError
session.to_json = lambda session: "x" * 1_000_000
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    session.export(None, Path(sys.argv[1]))
except UsageError as error:
    print(error)
"""


def test_a_full_disk_under_an_export(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    command = [sys.executable, "-c", EXPORT, str(path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{path}: File too large\n", "")
    assert not path.exists()


@pytest.mark.slow
def test_a_full_disk_under_a_model(tiny_model: Path, tmp_path: Path) -> None:
    """Kernels that can't be kept are said once; a result that can't be written, with the file."""
    text = tmp_path / "text.txt"
    text.write_text("The fox said hello to the owl. " * 8)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "LOCALKV_CPU": "native"}
    code, err, out = run(argv(COMPLETE, tiny_model), FULL, cache)
    assert (code, len(err)) == (0, 1), err
    assert err[0].startswith("compiled kernels are not kept in ")
    assert err[0].endswith(": File too large")
    assert run(argv(COMPLETE, tiny_model))[2] == out
    long = [*argv(COMPLETE, tiny_model, 100), "--ignore-eos", "-o", str(tmp_path / "o")]
    code, err, _ = run(long, FULL)
    assert (code, err) == (1, [f"error: {tmp_path / 'o'}: File too large"])
    assert (tmp_path / "o").stat().st_size <= 100
    scales = tmp_path / "scales.json"
    scales.write_text("before")
    measured = ["perplexity", "-m", str(tiny_model), "-f", str(text), "-c", "16", "--chunks", "1"]
    code, err, _ = run([*measured, "--calibrate-kv", str(scales)], FULL)
    assert code in (1, 2)
    assert err[-1].endswith(f"{scales}: File too large")
    assert scales.read_text() == "before"
    base = tmp_path / "base.npz"
    code, err, _ = run([*measured, "--save-base", str(base)], FULL)
    assert code == 1
    assert "Traceback" not in "\n".join(err)
    left = [p.name for p in tmp_path.iterdir()]
    assert sorted(left) == ["cache", "o", "scales.json", "text.txt"]


@pytest.mark.slow
@pytest.mark.long
def test_cold_starts_at_once(tiny_model: Path, tmp_path: Path) -> None:
    """Processes that all find no kernels compile, keep and take them without harm."""
    cache = {"XDG_CACHE_HOME": str(tmp_path), "LOCALKV_CPU": "native"}  # none are carried
    command = [sys.executable, "-m", "localkv", *argv(COMPLETE, tiny_model)]
    started = [
        subprocess.Popen(
            command,
            env=clean_env(**cache),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    ends = [(p.communicate(timeout=500), p.returncode) for p in started]
    assert ends == [((ends[0][0][0], b""), 0)] * 2
    kept = list((tmp_path / "localkv" / "kernels").iterdir())
    assert kept
    assert not [path for path in kept if path.suffix == ".tmp"]
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert run(argv(COMPLETE, tiny_model), variables=cache) == (0, [], ends[0][0][0].decode())
    assert {path: path.stat().st_mtime_ns for path in kept} == before


def config_of(kind: str) -> bytes:
    return {
        "long": b"[show]\n#" + b"x" * (1 << 20),
        "a long number": b"[complete]\nseed = " + b"9" * 100_000,
        "nested arrays": b"[complete]\nstop = " + b"[" * 50_000 + b"]" * 50_000,
        "nested tables": b"[complete]\nstop = " + b"{a=" * 20_000 + b"1" + b"}" * 20_000,
        "dotted key": b"a" + b".a" * 50_000 + b" = 1",
        "dotted table": b"[a" + b".a" * 50_000 + b"]",
        "twice": b"[show]\n[show]\n",
        "NUL": b'[complete]\nmodel = "a\x00b"\n',
        "not UTF-8": b"\xff\xfe\x00",
        "byte order": b"\xef\xbb\xbf[complete]\nseed=1\n",
        "escapes": b'[complete]\n"\\u001b[2J" = 1\n',
        "escapes in a table": b'["\\u001b]0;x\\u0007"]\nx = 1\n',
        "a date": b"[show]\nmodel = 1979-05-27\n",
        "a boolean": b"[show]\nmodel = true\n",
        "empty": b'[show]\nmodel = ""\n',
        "many keys": b"[show]\n" + b"".join(b"k%d=1\n" % i for i in range(20_000)),
        "no table": b'model = "x"\n',
    }[kind]


CONFIGS = (
    *("long", "a long number", "nested arrays", "nested tables", "dotted key", "dotted table"),
    *("twice", "NUL", "not UTF-8", "byte order", "escapes", "escapes in a table", "a date"),
    *("a boolean", "empty", "many keys", "no table"),
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_out_of_hand(kind: str, program, tiny_model: Path) -> None:
    program.config.parent.mkdir(exist_ok=True)
    program.config.write_bytes(config_of(kind))
    started = time.monotonic()
    result = program("show", tiny_model)
    assert time.monotonic() - started < 10
    if b"[complete]" in config_of(kind) and result.code == 0:
        return  # another command's value
    assert result.code == 2, result.err
    assert len(result.err_lines) <= 2
    assert len(result.err) < 500
    assert result.err.startswith(f"error: {program.config}: ")
    assert "\x1b" not in result.err


def test_a_configuration_that_is_no_file(program, tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, code in ((tmp_path / "pipe", 2), (tmp_path, 2), ("/dev/zero", 2), ("/dev/null", 0)):
        program.setenv(LOCALKV_CONFIG=str(path))
        result = program("show", tiny_model)
        assert result.code == code, path
        assert code == 0 or result.err.startswith(f"error: {path}: ")


ENVIRONMENTS: list[dict[str, str]] = [
    *({"COLUMNS": width} for width in ("0", "-5", "1000000000", "abc")),
    *({"LC_ALL": name} for name in ("xx_YY.garbage", "C", "\udcff")),
    *({"TERM": name} for name in ("", "\x1b[2J")),
    *({"HOME": name} for name in ("", "/dev/null", "/proc", "relative")),
    *({"XDG_CONFIG_HOME": name} for name in ("", "/dev/null", "relative", "\x01\n")),
    *({"XDG_CACHE_HOME": name} for name in ("", "/dev/null", "relative")),
    *({"HF_HOME": name} for name in ("/dev/null", "\x1b[2J")),
    *({name: "error"} for name in ("PYTHONWARNINGS", "LOCALKV_DEBUG")),
    *({"PYTHONIOENCODING": name} for name in ("ascii", "utf-16")),
    {"PYTHONOPTIMIZE": "2"},
    {"TMPDIR": "/nonexistent"},
]
COMPUTING: list[dict[str, str]] = [
    *({"OMP_NUM_THREADS": number} for number in ("abc", "0", "-1", "1000000000")),
    *({"NUMBA_NUM_THREADS": number} for number in ("abc", "0")),
    *({"OPENBLAS_NUM_THREADS": number} for number in ("-3", "x")),
    {"NUMBA_CACHE_DIR": "/dev/null"},
    {"TORCH_LOGS": "garbage"},
    {"OMP_WAIT_POLICY": "garbage"},
    {"CUDA_VISIBLE_DEVICES": "garbage"},
    {"TMPDIR": "/nonexistent"},
    {"LOCALKV_N_PREDICT": "9" * 30},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [slice(0, None, 5), pytest.param(slice(None), marks=pytest.mark.attack)], ids=str
)
def test_an_environment_out_of_hand(part: slice, tiny_model: Path) -> None:
    for variables in ENVIRONMENTS[part]:
        code, err, out = run(argv(SHOW, tiny_model), variables=variables)
        assert (code, err) == (0, []), variables
        assert "llama" in out or variables.get("PYTHONIOENCODING") == "utf-16"


@pytest.mark.attack
@pytest.mark.parametrize("variables", COMPUTING, ids=str)
def test_settings_of_libraries_out_of_hand(variables: dict[str, str], tiny_model: Path) -> None:
    code, err, out = run(argv(COMPLETE, tiny_model), variables=variables)
    if code != 0:
        assert code == 1
        assert "Traceback" not in "\n".join(err)
        assert next(iter(variables)) in err[-1]
    else:
        assert out


@pytest.mark.parametrize(
    "command",
    [
        ["show", "-m", ""],
        ["plan", "-m", ""],
        ["bench", "-m", ""],
        ["tokenize", "-m", "", "-p", "x"],
        ["complete", "-m", "", "-p", "x"],
        ["complete", "-m", "MODEL", "-f", ""],
        ["complete", "-m", "MODEL", "-p", "x", "-o", ""],
        ["complete", "-m", "MODEL", "-p", "x", "--chat-template-file", ""],
        ["plan", "-m", "MODEL", "--plot", ""],
        ["perplexity", "-m", "MODEL", "-f", ""],
    ],
)
def test_an_empty_name_is_no_folder(command: list[str], program, tiny_model: Path) -> None:
    result = program(*(str(tiny_model) if word == "MODEL" else word for word in command))
    assert result.code == 2
    assert "empty, expected the name of a file" in result.err


def test_a_text_without_end(program, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localkv.commands import texts

    monkeypatch.setattr(texts, "MOST_BYTES", 1000)
    result = program("tokenize", "-m", tiny_model, "-f", "/dev/zero")
    assert (result.code, result.err) == (2, "error: the prompt /dev/zero: more than 1000 B\n")
    result = program("tokenize", "-m", tiny_model, stdin=b"x" * 1001)
    assert (result.code, result.err) == (2, "error: the text on stdin: more than 1000 B\n")


@pytest.mark.parametrize("n_ctx", [16, 33])
def test_a_prompt_as_long_as_the_context(n_ctx: int, tiny_model: Path) -> None:
    """Nothing is cut off: one token of room is used, none ends at once, less is an error."""
    from localkv.errors import ContextOverflowError
    from localkv.llm import LLM

    llm = LLM(tiny_model, n_ctx=n_ctx)
    ids = [3 + i % 50 for i in range(n_ctx + 1)]
    room = llm.complete(ids[: n_ctx - 1], ignore_eos=True, temperature=0)
    assert (room.finish_reason, room.context_full) == ("length", True)
    assert room.usage.prompt_tokens == n_ctx - 1
    assert room.usage.completion_tokens == 1
    none = llm.complete(ids[:n_ctx], ignore_eos=True)
    assert (none.finish_reason, none.context_full, none.text) == ("length", True, "")
    assert (none.usage.prompt_tokens, none.usage.completion_tokens) == (n_ctx, 0)
    asked_for_none = llm.complete(ids[:n_ctx], max_tokens=0)
    assert (asked_for_none.finish_reason, asked_for_none.context_full) == ("length", False)
    assert llm.logits(ids[:n_ctx]).shape[0] == n_ctx
    for use in (lambda: llm.complete(ids), lambda: llm.logits(ids), lambda: llm.stream(ids)):
        with pytest.raises(ContextOverflowError, match=f"{n_ctx + 1} tokens"):
            use()
    # and all goes on after that
    again = llm.complete(ids[: n_ctx - 1], ignore_eos=True, temperature=0)
    assert again.text == room.text


SPLITS = {
    "missing": ("part", "1 of 2 parts of the model are missing"),
    "itself": ("link to the first", "split.no is not 1"),
    "a cycle": ("links in a circle", "are missing"),
    "of another": ("another model", "split.count is not 2"),
    "a folder": ("folder", "is a directory"),
    "a pipe": ("pipe", "not a regular file"),
    "empty": ("nothing", "the file is empty"),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_parts_that_do_not_belong_together(kind: str, program, tmp_path: Path) -> None:
    from support.gguf_bytes import U16, Tensor, gguf_bytes

    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))

    def part(number: int, count: int) -> bytes:
        keys = [("split.count", U16, count), ("split.no", U16, number)]
        return bytes(gguf_bytes(keys, [Tensor(f"t{number}", (8,), 0, bytes(32))]).data)

    first.write_bytes(part(0, 2))
    if kind == "itself":
        second.symlink_to(first)
    elif kind == "a cycle":
        second.symlink_to(tmp_path / "other.gguf")
        (tmp_path / "other.gguf").symlink_to(second)
    elif kind == "of another":
        second.write_bytes(part(1, 3))
    elif kind == "a folder":
        second.mkdir()
    elif kind == "a pipe":
        os.mkfifo(second)
    elif kind == "empty":
        second.touch()
    for command in (["show", first], ["plan", first], ["tokenize", "-m", first, "-p", "x"]):
        result = program(*command)
        assert result.code == 1
        assert SPLITS[kind][1] in result.err
        assert len(result.err_lines) <= 2
