"""`pull`, `list`, `rm`, and `-hf` of every command that takes a model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import gguf
import pytest

from localkv.loader.gguf_file import open_gguf
from localkv.loader.metadata import FILE_TYPES
from support.fake_hub import COMMIT, FakeHub
from support.fake_llm import FakeLLM
from support.paths import ROOT
from support.program import Program, clean_env, hub_env, loaded_by, localkv_process, on_terminal
from support.waiting import wait_for

REPO = "org/tiny-GGUF"


@pytest.fixture
def repo(hub: FakeHub, tiny_model: Path) -> FakeHub:
    """A hub with a tiny model in one repository, under two names."""
    data = tiny_model.read_bytes()
    hub.repos[REPO] = {
        "tiny-Q4_K_M.gguf": data,
        "tiny-F16.gguf": data + bytes(32),
        "mmproj-F16.gguf": b"x" * 200,
    }
    return hub


@pytest.fixture
def here(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program, in a folder without a shelf."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("localkv.loader.local_models.shelves", list)
    return program


# -- one syntax for all commands


def test_every_command_takes_a_name(here: Program, repo: FakeHub, tiny_model: Path) -> None:
    expected = here("tokenize", "-m", tiny_model, "-p", "fox", "--ids").out
    first = here("tokenize", "-hf", REPO, "-p", "fox", "--ids")
    assert first.out == expected
    size = tiny_model.stat().st_size / 1024
    assert first.err == f"fetching {REPO}/tiny-Q4_K_M.gguf: {size:.2f} KiB\n"
    for flags in (
        ["-hf", f"{REPO}:q4_k_m"],
        ["-hfr", REPO, "-hff", "tiny-Q4_K_M.gguf"],
        ["-m", f"hf.co/{REPO}"],
        ["-m", f"https://huggingface.co/{REPO}/blob/{COMMIT}/tiny-Q4_K_M.gguf"],
        ["-m", f"{REPO}:Q4_K_M"],
        ["-m", REPO],
    ):
        result = here("tokenize", *flags, "-p", "fox", "--ids")
        assert (result.out, result.err) == (expected, "")
    assert len(repo.downloads) == 1
    ids = [word.strip("[],\n") for word in expected.split()]
    assert here("detokenize", "-hf", REPO, *ids[1:]).out == "fox\n"
    for argv in (["show", "-hf", REPO], ["show", f"hf.co/{REPO}"], ["show", REPO]):
        assert "architecture    llama" in here(*argv).out


def test_complete_and_perplexity_load_it(
    here: Program, repo: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Script(FakeLLM):
        pass

    monkeypatch.setattr("localkv.llm.LLM", Script)
    assert here("complete", "-hf", REPO, "-p", "x").out == "one two\n"
    path = Script.loaded["path"]
    assert path.name == "tiny-Q4_K_M.gguf"
    text = tmp_path / "text"
    text.write_text("x")
    Script.loaded = {}
    here("perplexity", "-m", f"hf.co/{REPO}", "-f", text)
    assert Script.loaded["path"] == path


def test_the_python_api_takes_it(repo: FakeHub) -> None:
    from localkv import LLM

    assert LLM(f"hf.co/{REPO}", device="reference", n_ctx=64).config.name == "tiny"


def test_variables_and_configuration(here: Program, repo: FakeHub) -> None:
    run = ("tokenize", "-p", "fox", "--ids")
    for variables in (
        {"LOCALKV_MODEL": f"hf.co/{REPO}"},
        {"LOCALKV_HF_REPO": REPO},
        {"LLAMA_ARG_HF_REPO": REPO, "LLAMA_ARG_HF_FILE": "tiny-F16.gguf"},
    ):
        here.setenv(**variables)
        assert here(*run).code == 0
        here.setenv(**dict.fromkeys(variables, ""))
    here.write_config(f'[tokenize]\nhf-repo = "{REPO}"\nhf-file = "tiny-F16.gguf"\n')
    assert here(*run).code == 0
    assert [r.path.rsplit("/")[-1] for r in repo.downloads] == ["tiny-Q4_K_M.gguf", "tiny-F16.gguf"]


def test_a_truncated_file_is_fetched_again(here: Program, repo: FakeHub, tmp_path: Path) -> None:
    path = Path(here("pull", f"{REPO}/tiny-F16.gguf").out.strip())
    for n_bytes in (path.stat().st_size // 2, 3, 0):
        os.truncate(path, n_bytes)
        result = here("complete", "-m", path, "-p", "x")
        assert result.code == 1
        hint = f"localkv pull {REPO}/tiny-F16.gguf fetches it again"
        assert result.err_lines[-1] == f"hint: {hint}"
        assert here(*hint.split()[1:3]).code == 0
        assert here("show", "-m", path).code == 0
    other = tmp_path / "other.gguf"
    other.write_bytes(path.read_bytes()[:1000])
    assert here("show", other).err_lines[1] == "hint: download it again"


def test_the_nearest_name_wins(here: Program, repo: FakeHub, tiny_model: Path) -> None:
    here.setenv(LOCALKV_HF_REPO="no/such", LOCALKV_HF_FILE="none.gguf")
    here.write_config('[show]\nmodel = "none.gguf"\n')
    assert here("show", "-m", tiny_model).code == 0
    assert here("show", tiny_model).code == 0
    assert here("show", "-hf", REPO).code == 0
    result = here("show")
    assert result.err_lines[0] == f"error: no/such is not a repository on 127.0.0.1:{repo.port}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "x.gguf", "-hf", "a/b"], "-m and -hf both name a model, give one"),
        (
            ["-m", "x.gguf", "-hff", "y.gguf"],
            "-hff names a file of a repository, and there is none",
        ),
        (["-hf", "nothing"], "'nothing' does not name a model on Hugging Face"),
        (
            ["-m", "https://example.com/x.gguf"],
            "'https://example.com/x.gguf' is not on Hugging Face",
        ),
        (["-hf", "a/b:Q4_0", "-hff", "x.gguf"], "'a/b:Q4_0' and 'x.gguf' name two files, give one"),
    ],
)
def test_wrong_usage(here: Program, hub: FakeHub, argv: list[str], message: str) -> None:
    result = here("complete", *argv, "-p", "x")
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0] == f"error: {message}"
    assert hub.requests == []


def test_a_mistyped_path_is_no_request(here: Program, repo: FakeHub) -> None:
    result = here("show", "-m", "models/tiny")
    assert result.err_lines == [
        "error: models/tiny: no such file",
        "hint: -hf models/tiny takes the model of this name from Hugging Face",
    ]
    assert here("show", "models/tiny.gguf").err == "error: models/tiny.gguf: no such file\n"
    Path("models").mkdir()
    Path("models/tiny-Q8_0.gguf").touch()
    assert here("show", "models/tiny-Q8.gguf").err == (
        "error: models/tiny-Q8.gguf: no such file; did you mean models/tiny-Q8_0.gguf?\n"
    )
    assert here("show", "models").err_lines == [
        "error: models: is a directory, not a model file",
        "hint: it has models/tiny-Q8_0.gguf",
    ]
    assert repo.requests == []


@pytest.mark.parametrize(
    ("command", "name", "hint"),
    [
        ("plan", "llama3.2:3b", "-hf ORG/REPO takes a model from Hugging Face; localkv list "),
        ("show", "llama-8b", "-hf ORG/REPO takes a model from Hugging Face; localkv list "),
        ("plan", "org/tiny-GGUF:Q2_K", "-hf org/tiny-GGUF:Q2_K takes the model of this name"),
        ("plan", "llama-8b:q4_K", "--synthetic llama-8b:q4_K takes a shape instead of a file"),
    ],
)
def test_a_name_that_is_no_file_has_a_hint(
    here: Program, hub: FakeHub, command: str, name: str, hint: str
) -> None:
    result = here(command, name)
    assert result.code == 1
    assert result.err_lines[0] == f"error: {name}: no such file"
    assert result.err_lines[1].startswith(f"hint: {hint}")
    assert hub.requests == []


def test_a_path_that_exists_is_a_path(here: Program, hub: FakeHub, tiny_model: Path) -> None:
    Path("hf.co/org").mkdir(parents=True)
    Path("hf.co/org/tiny").write_bytes(tiny_model.read_bytes())
    assert "architecture    llama" in here("show", "-m", "hf.co/org/tiny").out
    assert hub.requests == []


def test_offline(here: Program, repo: FakeHub) -> None:
    result = here("show", "-hf", REPO, "--offline")
    assert (result.code, len(result.err_lines)) == (1, 2)
    assert result.err_lines[0] == (
        f"error: {REPO} is not in the cache, and requests are turned off"
    )
    assert repo.requests == []


# -- pull


def test_pull_prints_the_path(here: Program, repo: FakeHub, tmp_path: Path) -> None:
    result = here("pull", f"{REPO}:f16")
    assert result.code == 0
    path = Path(result.out.removesuffix("\n"))
    assert path.read_bytes() == repo.repos[REPO]["tiny-F16.gguf"]
    assert path.is_relative_to(tmp_path / "hub")
    assert result.err.startswith(f"fetching {REPO}/tiny-F16.gguf: ")
    again = here("pull", f"{REPO}:F16")
    assert (again.out, again.err) == (result.out, f"note: {REPO}:F16 is up to date\n")
    assert here("pull", REPO, "-hff", "tiny-Q4_K_M.gguf").out.endswith("tiny-Q4_K_M.gguf\n")


def test_pull_asks_for_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[REPO] = {"m.gguf": b"x" * 1000}
    with localkv_process("pull", REPO, env=hub_env(hub, tmp_path)) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert [request.path for request in hub.requests] == [
        f"/api/models/{REPO}/revision/main",
        f"/{REPO}/resolve/{COMMIT}/m.gguf",
    ]


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("no/such", "no/such is not a repository on {host}"),
        (f"{REPO}:Q2_K", f"{REPO}:Q2_K is not in {{host}}"),
        (f"{REPO}/none.gguf", f"{REPO} has no file none.gguf in {{host}}"),
    ],
)
def test_pull_of_what_is_not_there(here, repo: FakeHub, reference: str, error: str) -> None:
    result = here("pull", reference)
    assert (result.code, result.out) == (1, "")
    assert result.err_lines[0] == "error: " + error.format(host=f"127.0.0.1:{repo.port}")
    assert len(result.err_lines) == 2


def test_pull_without_a_network_names_other_ways(tmp_path: Path) -> None:
    env = clean_env(HF_ENDPOINT="http://127.0.0.1:1", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    with localkv_process("pull", REPO, env=env) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    error, hint = err.decode().splitlines()
    assert error.startswith("error: 127.0.0.1:1 can't be reached: ")
    assert "HTTPS_PROXY" in hint
    assert "-m FILE" in hint


def test_a_killed_pull_loses_nothing(hub: FakeHub, tmp_path: Path) -> None:
    data = hashlib.shake_128(b"model").digest(3 << 20)
    hub.repos[REPO] = {"m-Q4_K_M.gguf": data}
    hub.stall_after = 2 << 20
    env = hub_env(hub, tmp_path)
    partial = tmp_path / "hub" / "models--org--tiny-GGUF" / "blobs"
    with localkv_process("pull", REPO, env=env) as process:
        assert hub.stalled.wait(60)
        (path,) = partial.glob("*.incomplete")
        wait_for(lambda: path.stat().st_size >= 2 << 20, seconds=30)
        process.kill()
    hub.stall_after = None
    hub.go_on.set()
    with localkv_process("pull", REPO, env=env) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.decode() == (f"fetching {REPO}/m-Q4_K_M.gguf: 3.00 MiB, 2.00 MiB of them here\n")
    assert Path(out.decode().strip()).read_bytes() == data
    assert [r.range for r in hub.downloads] == ["bytes=0-", f"bytes={2 << 20}-"]
    assert hub.downloads[1].sent == 1 << 20


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupted_pull_is_130(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[REPO] = {"m-Q4_K_M.gguf": bytes(1 << 20)}
    hub.stall_after = 1 << 19
    with localkv_process("pull", REPO, env=hub_env(hub, tmp_path)) as process:
        assert hub.stalled.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert err.count(b"\n") == 1


def test_one_bar_on_a_terminal(hub: FakeHub, tmp_path: Path, monkeypatch) -> None:
    hub.repos[REPO] = {f"m-Q4_K_M-0000{i}-of-00002.gguf": bytes([i]) * (1 << 20) for i in (1, 2)}
    for name, value in hub_env(hub, tmp_path).items():
        monkeypatch.setenv(name, value)
    code, shown = on_terminal("pull", REPO)
    assert code == 0
    assert shown.startswith(
        f"fetching {REPO}/m-Q4_K_M-00001-of-00002.gguf in 2 parts: 2.00".encode()
    )
    assert b"2.0/2.0 MiB" in shown
    assert shown.rstrip().endswith(b"m-Q4_K_M-00001-of-00002.gguf")


# -- list and rm


def test_an_empty_list(here: Program, hub: FakeHub) -> None:
    assert here("list").out.split() == ["NAME", "SIZE", "QUANT", "ARCH", "CONTEXT", "MODIFIED"]
    assert here("list", "-q").out == ""
    assert json.loads(here("list", "--json").out) == {"models": []}


def test_list_shows_shelf_and_cache(
    program: Program, repo: FakeHub, tiny_model: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shelf = tmp_path / "models"
    shelf.mkdir()
    (shelf / "mine.gguf").write_bytes(tiny_model.read_bytes())
    (shelf / "mmproj-mine.gguf").write_bytes(b"no model")
    (shelf / "half-00001-of-00002.gguf").write_bytes(b"no model")
    monkeypatch.setattr("localkv.loader.local_models.shelves", lambda: [Path("models")])
    assert program("pull", REPO).code == 0
    names = ["models/mine.gguf", f"{REPO}:Q4_K_M"]
    assert program("list", "-q").out.splitlines() == names
    for name in names:
        assert program("show", "-m", name).code == 0
    facts = json.loads(program("list", "--json").out)["models"]
    assert [fact["name"] for fact in facts] == names
    for fact in facts:
        assert open_gguf(fact["path"]).file_bytes == fact["bytes"]
        assert (fact["architecture"], fact["context"]) == ("llama", 256)
        assert fact["modified"].endswith("+00:00")
    rows = program("list").out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == names
    assert rows[1].split()[3:6] == ["-", "llama", "256"]
    assert rows[2].endswith("just now")


def test_list_goes_on_after_a_damaged_file(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/bad.gguf").write_bytes(b"not a model")
    monkeypatch.setattr("localkv.loader.local_models.shelves", lambda: [Path("models")])
    result = program("list")
    assert result.code == 0
    assert result.out.splitlines()[1].split()[:6] == ["models/bad.gguf", "11", "B", "-", "-", "-"]
    assert result.err.startswith("warning: models/bad.gguf: not a GGUF file")


def test_the_shelf_that_ships_is_listed() -> None:
    from localkv.loader.local_models import models_on, shelves

    found = {folder.resolve(): folder for folder in shelves()}
    shelf = found[ROOT / "models"]
    assert "tales-4M-F16.gguf" in [model.path for model in models_on(shelf)]


def test_file_types_are_ggmls() -> None:
    from gguf.constants import LlamaFileType

    theirs = {
        member.value: member.name.removeprefix("MOSTLY_").removeprefix("ALL_")
        for member in LlamaFileType
        if member is not LlamaFileType.GUESSED
    }
    assert {n: name for n, name in FILE_TYPES.items() if n in theirs} == theirs


def test_a_header_without_facts(program: Program, tmp_path: Path, monkeypatch, hub) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    writer = gguf.GGUFWriter("models/m.gguf", "mamba")
    writer.add_file_type(1024 + 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("localkv.loader.local_models.shelves", lambda: [Path("models")])
    row = program("list").out.splitlines()[1].split()
    assert row[3:6] == ["Q8_0", "mamba", "-"]


def test_rm(here: Program, repo: FakeHub, tmp_path: Path) -> None:
    here("pull", REPO)
    here("pull", f"{REPO}:F16")
    refused = here("rm", f"{REPO}:F16")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err_lines[0] == "error: stdin is not a terminal to ask on"
    several = here("rm", REPO, "--yes")
    assert several.code == 1
    assert several.err_lines[0] == f"error: {REPO} can mean 2 models in the cache"
    assert len(here("list", "-q").out.splitlines()) == 2
    result = here("rm", f"{REPO}:f16", "--yes")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith(f"deleted {REPO}:F16, ")
    assert here("list", "-q").out == f"{REPO}:Q4_K_M\n"
    assert here("rm", f"hf.co/{REPO}", "-y").code == 0
    assert not list((tmp_path / "hub").glob("models--*"))
    assert here("rm", REPO, "-y").err_lines[0].startswith(f"error: {REPO} is not in the cache")


@pytest.mark.parametrize(
    ("answer", "stays"), [("y", False), ("Yes", False), ("n", True), ("", True)]
)
def test_rm_asks(here: Program, repo: FakeHub, monkeypatch, answer: str, stays: bool) -> None:
    from localkv.commands.local_models import _remove

    here("pull", REPO)
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    code = _remove(reference=REPO, hf_file=None, yes=False)
    assert (code == 1) == stays == (here("list", "-q").out != "")


class Terminal:
    """A terminal on which a line is typed."""

    def __init__(self, line: str) -> None:
        self.readline = lambda: line

    def isatty(self) -> bool:
        return True


def test_rm_leaves_files_alone(here: Program, hub: FakeHub) -> None:
    Path("mine.gguf").touch()
    result = here("rm", "mine.gguf", "--yes")
    assert result.code == 2
    assert Path("mine.gguf").exists()


# -- what is imported


@pytest.mark.slow
def test_imports(
    hub: FakeHub, repo: FakeHub, tiny_model: Path, tmp_path: Path, monkeypatch
) -> None:
    for name, value in hub_env(hub, tmp_path).items():
        monkeypatch.setenv(name, value)
    for command in ("pull", "list", "rm"):
        assert loaded_by(command, "--help") == []
    assert not {"torch", "hf_xet"} & set(loaded_by("pull", REPO))
    assert set(loaded_by("list")) <= {"numpy", "huggingface_hub"}
    assert set(loaded_by("show", "-hf", REPO)) <= {"numpy", "huggingface_hub"}
    assert loaded_by("show", tiny_model) == ["numpy"]
    assert "torch" not in loaded_by("rm", REPO, "--yes")
