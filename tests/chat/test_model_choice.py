"""Whether a model that is named in a chat can be loaded, from its header alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localkv.chat import model_choice
from localkv.chat.engine import EngineOptions
from localkv.chat.model_choice import Models
from localkv.chat.store import SessionCache
from localkv.errors import DoesNotFitError, LocalKVError, ModelFileError, UsageError
from localkv.system.machine_memory import Budget
from support.paths import MODELS
from support.tiny_model import write_tiny_model

TALES = MODELS / "tales-4M-F16.gguf"


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "models"
    shelf.mkdir()
    (shelf / "tales.gguf").symlink_to(TALES)
    (shelf / "deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    models = Models()
    for name in (str(shelf / "tales.gguf"), "models/tales.gguf", "tales.gguf", "tales"):
        assert Path(models.find(name)).samefile(TALES), name
    assert models.completions("models/ta") == ["models/tales.gguf"]
    assert "models/" in models.completions("")
    assert ".hidden/" not in models.completions("")
    assert "models/deep/" in models.completions("models/")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.gguf", "nowhere.gguf: no such file (/model alone lists"),
        ("/no/such", "/no/such: no such file"),
        ("~nobody-here/x", "~nobody-here/x: no such file"),
        ("nul\0.gguf", "no such file"),
        ("x" * 5000, "no such file"),
        ("org/repo", "org/repo is not on this machine (localkv pull org/repo fetches it)"),
    ],
)
def test_a_name_of_nothing(name: str, message: str) -> None:
    assert Models().completions(name) == []
    with pytest.raises(ModelFileError) as caught:
        Models().find(name)
    assert message in str(caught.value)


def test_a_good_model_passes() -> None:
    Models().check(EngineOptions(str(TALES), {"n_ctx": 256}), backend="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache_type_k": "q9_9"}, UsageError, "q9_9"),
        ({"kv_scales": "/no/such/file"}, UsageError, "no cache type chosen uses scales"),
        ({"n_ctx": 1 << 40}, DoesNotFitError, "would fit"),
    ],
)
def test_a_cache_that_can_not_be(
    arguments: dict[str, object], error: type[LocalKVError], message: str
) -> None:
    with pytest.raises(error) as caught:
        Models().check(EngineOptions(str(TALES), arguments), backend="cpu")
    assert message in str(caught.value)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain.gguf", template=False)
    with pytest.raises(UsageError) as caught:
        Models().check(EngineOptions(str(plain)), backend="cpu")
    assert "plain.gguf has no chat template" in str(caught.value)
    Models().check(EngineOptions(str(plain), chat_template="{{ messages }}"), backend="cpu")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(TALES.read_bytes()[:1000])
    with pytest.raises(ModelFileError):
        Models().check(EngineOptions(str(bad)), backend="cpu")


def test_memory_of_the_running_engine_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(str(TALES), {"n_ctx": 1 << 20})
    monkeypatch.setattr(model_choice, "machine_memory", lambda: Budget(1 << 20, "left"))
    with pytest.raises(DoesNotFitError):
        Models().check(options, backend="cpu")
    monkeypatch.setattr(model_choice, "process_bytes", lambda pid: 1 << 45 if pid == 7 else 0)
    Models().check(options, backend="cpu", running_pid=7)
    Models().check(replace(options, arguments={**options.arguments, "fit": "off"}), backend="cpu")


def test_the_check_imports_no_torch() -> None:
    code = (
        "import sys; from localkv.chat.model_choice import Models;"
        "from localkv.chat.engine import EngineOptions;"
        f"Models().check(EngineOptions({str(TALES)!r}), backend='cpu');"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("had", "chosen", "taken"),
    [
        (SessionCache(8192), {}, {"n_ctx": 8192}),
        (
            SessionCache(8192, "q8_0", "q4_0"),
            {},
            {"n_ctx": 8192, "cache_type_k": "q8_0", "cache_type_v": "q4_0"},
        ),
        (SessionCache(1 << 20, model="other.gguf"), {}, {"n_ctx": 16384}),  # as it was trained
        (SessionCache(1 << 20, model=f"there/{TALES.name}"), {}, {"n_ctx": 1 << 20}),
        (SessionCache(8192), {"n_ctx": 4096}, None),
        (SessionCache(8192), {"n_ctx": 0}, None),
        (SessionCache(8192), {"kv_budget": 1 << 20}, None),
        (SessionCache(4096), {}, None),
        (SessionCache(1024), {}, None),
        (SessionCache(), {}, None),
    ],
)
def test_the_context_that_a_session_had(
    monkeypatch: pytest.MonkeyPatch,
    had: SessionCache,
    chosen: dict[str, object],
    taken: dict[str, object] | None,
) -> None:
    trained = replace(model_choice.checked_spec(model_choice.open_gguf(TALES)), n_ctx_train=16384)
    monkeypatch.setattr(model_choice, "checked_spec", lambda header: trained)
    options = EngineOptions(str(TALES), {"n_threads": 3, **chosen})
    found = Models().with_context(options, had, names_types=False)
    wanted = None if taken is None else {"n_threads": 3, **chosen, **taken}
    assert (None if found is None else found.arguments) == wanted
    named = Models().with_context(options, had, names_types=True)
    assert named is None or "cache_type_k" not in named.arguments
