"""`--override-kv`: values in the place of a file's, for all that reads its metadata."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.commands.complete import complete
from localkv.commands.loading_options import override_flags
from localkv.config import Overrides
from localkv.errors import UsageError
from localkv.llm import LLM
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec, with_overrides
from support.program import Program

BOS = "tokenizer.ggml.add_bos_token"
EPS = "llama.attention.layer_norm_rms_epsilon"


def parsed(*words: str) -> dict[str, Any] | None:
    found: dict[str, Any] = complete.make_context("complete", ["-m", "x", *words]).params
    kv: dict[str, Any] | None = found["override_kv"]
    return kv


def test_spellings_of_llama_cpp() -> None:
    assert parsed() is None
    given = f'{BOS}=bool:false,a.b=int:-3,"c=str:one, ""two"" = 3",d=float:1e-5,e=str:'
    words = ("--override-kv", given, "--override-kv", '"f=str:x:y=z\n,"')
    found = {BOS: False, "a.b": -3, "c": 'one, "two" = 3', "d": 1e-5, "e": "", "f": "x:y=z\n,"}
    assert parsed(*words) == found
    assert [*map(type, found.values())] == [*map(type, (parsed(*words) or {}).values())]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "'a' is not KEY=TYPE:VALUE"),
        ("a=1", "'a=1' is not KEY=TYPE:VALUE"),
        ("a=u32:1", "'a=u32:1' is not KEY=TYPE:VALUE"),
        ("=int:1", "'=int:1' is not KEY=TYPE:VALUE"),
        ("a=int:1,", "'' is not KEY=TYPE:VALUE"),
        ("a=int:1.5", "'a' is '1.5', which is no int"),
        ("a=float:x", "'a' is 'x', which is no float"),
        ("a=bool:yes", "'a' is 'yes', which is no bool"),
        ("a=int:1,a=int:2", "names 'a' twice"),
    ],
)
def test_a_text_that_is_none(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parsed("--override-kv", text)
    assert message in str(raised.value)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
values = st.integers(-(2**63), 2**63 - 1) | st.booleans() | texts | st.floats(allow_nan=False)
keys = st.text("abc._", min_size=1, max_size=8)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(keys, values, min_size=1, max_size=4))
def test_what_plan_writes_is_read_again(kv: dict[str, Any]) -> None:
    plain = {param.name: None for param in complete.params}
    words = override_flags({**plain, "override_kv": kv, "rope_scale": 2.0})
    assert words[:2] == ["--rope-scale", "2.0"]
    found = parsed(*words)
    assert found == kv
    assert {k: type(v) for k, v in kv.items()} == {k: type(v) for k, v in (found or {}).items()}


def test_the_model_is_what_the_keys_say(tiny_model: Path) -> None:
    gguf = open_gguf(tiny_model)
    spec = model_spec(with_overrides(gguf, Overrides({EPS: 1e-3, "llama.context_length": 99})))
    assert spec.n_ctx_train == 99
    assert spec.output_norm.eps == pytest.approx(1e-3, rel=1e-6)
    assert with_overrides(gguf, Overrides()) is gguf


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ({"llama.block_cuont": 1}, "reads the key 'llama.block_cuont'; did you mean llama.block_c"),
        ({"general.alignment": 32}, "nothing of this model reads the key 'general.alignment'"),
        ({"llama.block_count": "two"}, "key 'llama.block_count' is a string, expected an integer"),
        ({"llama.block_count": 2.0}, "key 'llama.block_count' is a number, expected an integer"),
        ({BOS: 1}, f"key '{BOS}' is an integer, expected a boolean"),
        ({EPS: -1.0}, f"key '{EPS}' is -1.0, expected 1e-20 to 1"),
        ({EPS: math.nan}, f"key '{EPS}' is nan, expected 1e-20 to 1"),
        ({EPS: 1e300}, f"key '{EPS}' is 1e+300, too large"),
        ({"tokenizer.ggml.tokens": "a"}, "is a string, expected an array of strings"),
        ({"tokenizer.ggml.pre": "none"}, "pre-tokenizer 'none'"),
        ({"a" * 128: 1}, "is no key of a file"),
        ({"a": [1]}, "override_kv: a is [1]"),
        ({"a": 2**63}, "does not fit in 64 bits"),
    ],
)
def test_what_makes_no_sense_is_refused(kv: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(UsageError) as raised:
        with_overrides(open_gguf(tiny_model), Overrides(kv))
    assert message in str(raised.value)


def test_the_pre_tokenizer_is_named_once() -> None:
    arguments = {"override_pre": "qwen2", "override_kv": {"tokenizer.ggml.pre": "qwen2"}}
    with pytest.raises(UsageError, match="are the same"):
        Overrides.of(arguments)


def test_tokens_templates_and_states_follow(tiny_model: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}!"
    kv = {BOS: False, "tokenizer.chat_template": template, EPS: 1e-3}
    state = tmp_path / "text.state"
    with LLM(tiny_model, n_ctx=64, device="cpu") as llm:
        llm.complete("one two", max_tokens=3, temperature=0)
        assert llm.tokenizer.add_bos
        llm.save_state(state)
    with LLM(tiny_model, n_ctx=64, device="cpu", override_kv=kv) as llm:
        assert not llm.tokenizer.add_bos
        assert llm.chat_template is not None
        assert llm.chat_template.source == template
        assert llm.config.output_norm.eps == pytest.approx(1e-3, rel=1e-6)
        with pytest.raises(UsageError, match="another model"):
            llm.load_state(state)


def test_commands_show_what_options_put_there(program: Program, tiny_model: Path) -> None:
    words = ("--override-kv", "llama.context_length=int:99", "--rope-scale", "2")
    facts = json.loads(program("show", tiny_model, *words, "--json").out)
    assert facts["model"]["n_ctx_train"] == 198
    plan = program("plan", tiny_model, *words, "-c", "199", "--memory", "1GiB", "-ctk", "f16")
    assert "longer than the 198 the model was trained for" in plan.err
    assert "--override-kv llama.context_length=int:99" in plan.out
    shown = program("tokenize", "-m", tiny_model, "-p", "one", "--override-kv", f"{BOS}=bool:false")
    assert shown.code == 0, shown.err
    small = ("-p", "8", "-n", "0", "-r", "1", "-dev", "cpu")
    bench = program("bench", "-m", tiny_model, *words, *small)
    assert bench.code == 0, bench.err
    for command in ("plan", "bench"):
        refused = program(command, "--synthetic", "llama-1b:q4_0", *words)
        assert refused.code == 2
        assert "--synthetic has no file" in refused.err
