"""llama-server's options become options of `localkv serve`, for llama.cpp's tests of its server."""

from __future__ import annotations

import importlib.util

import pytest

from support.paths import ROOT

_spec = importlib.util.spec_from_file_location(
    "llama_server_shim", ROOT / "tests" / "server" / "llama_server_shim.py"
)
assert _spec is not None
assert _spec.loader is not None
shim = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shim)


def test_a_context_is_shared_among_slots_as_there():
    given = [
        "--port",
        "80",
        "--ctx-size",
        "512",
        "--parallel",
        "2",
        "--hf-repo",
        "x",
        "--offline",
        "--no-slots",
        "--spec-type",
        "draft-simple",
    ]
    found = shim.translated(given, "m.gguf", never=["2"])
    expected = "serve -m m.gguf -np 2 --port 80 --no-slots --spec draft -c 256 --cache-tokens 512"
    assert found == [*expected.split(), "--no-metrics", "-l", "2-inf"]
    shared = shim.translated([*given, "--kv-unified", "--metrics"], "m.gguf")
    assert shared[-4:] == ["-c", "512", "--cache-tokens", "512"]


@pytest.mark.parametrize("options", [["--lora", "a"], ["--spec-type", "mtp"]])
def test_what_there_is_not_is_named(options: list[str]):
    with pytest.raises(ValueError, match=r"--lora|--spec-type"):
        shim.translated(options, "m.gguf")
