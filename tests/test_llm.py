"""The public Python API, on a tiny model with a tokenizer and on one without."""

from __future__ import annotations

import math
from pathlib import Path
from threading import Event

import gguf
import numpy as np
import pytest

import localkv
from localkv import LLM, LocalKVError, SamplingParams
from localkv.cache.profile import wants_scales
from localkv.errors import ContextOverflowError, ModelFileError, UsageError
from localkv.quality.ranges import calibrate
from localkv.quant_formats import KV_FORMATS
from support.cache_types import PAIRS
from support.quick import quick
from support.random_model import RandomModel
from support.tiny_model import CONTEXT, write_tiny_model

PROMPT = "Once upon a time there was a fox"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, n_ctx=200)


def test_names_of_the_package() -> None:
    assert localkv.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = localkv.nonsense


def test_logits_and_tokens(llm: LLM) -> None:
    ids = llm.tokenize(PROMPT)
    assert ids[0] == llm.tokenizer.bos_id
    assert llm.detokenize(ids[1:]) == PROMPT
    assert llm.tokenize("<|user|>") != llm.tokenize("<|user|>", parse_special=True)
    logits = llm.logits(ids)
    assert logits.dtype == np.float32
    assert logits.shape == (len(ids), llm.config.n_vocab)
    assert np.array_equal(llm.logits(ids), logits)


def test_stream_is_the_completion(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=30, seed=4)
    pieces = list(stream)
    completion = llm.complete(PROMPT, max_tokens=30, seed=4)
    assert "".join(pieces) == completion.text == stream.completion.text
    assert len(pieces) > 5
    assert completion.seed == 4
    usage = completion.usage
    assert usage.prompt_tokens == len(llm.tokenize(PROMPT))
    assert usage.completion_tokens == 30
    assert usage.total_tokens == usage.prompt_tokens + 30
    assert usage.cached_tokens == usage.prompt_tokens - 1
    assert completion.timings.decode_per_second > 0


def test_greedy_is_what_the_logits_say(llm: LLM) -> None:
    ids = llm.tokenize(PROMPT)
    text = llm.complete(PROMPT, max_tokens=8, temperature=0).text
    assert llm.complete(ids, max_tokens=8, temperature=0).text == text
    for _ in range(8):
        ids.append(int(llm.logits(ids)[-1].argmax()))
    whole = llm.detokenize(ids[1:])
    assert whole.endswith(text)


def test_stop_strings(llm: LLM) -> None:
    whole = llm.complete(PROMPT, max_tokens=40, temperature=0).text
    stop = whole[10:13]
    completion = llm.complete(PROMPT, max_tokens=40, temperature=0, stop=[stop, "never"])
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish_reason == "stop"
    assert llm.complete(PROMPT, max_tokens=40, temperature=0, stop=stop).text == completion.text


def test_end_of_generation(llm: LLM) -> None:
    """EOS ends a text and is not part of it; `ignore_eos` never draws it."""
    eos = llm.tokenizer.eos_id
    assert eos is not None
    only_eos = {"logit_bias": {eos: 1000.0}}
    completion = llm.complete(PROMPT, max_tokens=9, **only_eos)
    assert (completion.text, completion.finish_reason) == ("", "stop")
    ignored = llm.complete(PROMPT, max_tokens=9, ignore_eos=True, **only_eos)
    assert ignored.usage.completion_tokens == 9
    assert ignored.finish_reason == "length"


def test_suppressed_tokens_are_never_drawn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = llm.tokenize(llm.complete(PROMPT, max_tokens=5, temperature=0).text, add_special=False)
    monkeypatch.setattr(llm.tokenizer, "suppressed_ids", frozenset(drawn))
    completion = llm.complete(PROMPT, max_tokens=5, temperature=0, logprobs=0)
    assert completion.logprobs is not None
    assert not {one.id for one in completion.logprobs} & set(drawn)


def test_the_end_of_the_context(llm: LLM) -> None:
    completion = llm.complete(PROMPT, ignore_eos=True)
    assert completion.usage.total_tokens == llm.cache.n_ctx
    assert completion.finish_reason == "length"
    assert completion.context_full
    assert not llm.complete(PROMPT, max_tokens=3, ignore_eos=True).context_full
    with pytest.raises(ContextOverflowError, match=r"\d+ tokens, but the context holds 200"):
        llm.stream("fox " * 300)


def test_cancel(llm: LLM) -> None:
    cancel = Event()
    stream = llm.stream(PROMPT, ignore_eos=True, cancel=cancel)
    next(stream)
    cancel.set()
    completion = stream.completion
    assert completion.finish_reason == "cancelled"
    assert 0 < completion.usage.completion_tokens < 10


def test_a_list_of_prompts(llm: LLM) -> None:
    """Each text is the one that it would be alone; what prompts begin with is read once."""
    prompts = [PROMPT, PROMPT + " and an owl", "The fox"]
    options = {"max_tokens": 6, "seed": 3}
    completions = llm.complete(prompts, **options)
    assert [one.text for one in completions] == [llm.complete(p, **options).text for p in prompts]
    assert completions[1].usage.cached_tokens == len(llm.tokenize(PROMPT))
    ids = [llm.tokenize(prompt) for prompt in prompts]
    assert [one.text for one in llm.complete(ids, **options)] == [one.text for one in completions]
    special = llm.complete(["<|user|>"], max_tokens=0, parse_special=True)
    assert special[0].usage.prompt_tokens == len(llm.tokenize("<|user|>", parse_special=True))


def test_many_prompts_at_the_same_time(path: Path) -> None:
    """Each text is the one that it would be alone, with its stop string, logprobs and reason."""
    llm = LLM(path, n_ctx=200, n_parallel=3, n_cache_tokens=512)
    prompts = [PROMPT, PROMPT + " and an owl", "The fox", PROMPT, "a b c"]
    options = {"max_tokens": 12, "seed": 3, "stop": "e", "logprobs": 2}
    many = llm.complete_many(prompts, **options)
    llm.engine.reset()
    for prompt, one in zip(prompts, many, strict=True):
        alone = llm.complete(prompt, **options)
        assert (one.text, one.finish_reason, one.seed) == (
            alone.text,
            alone.finish_reason,
            alone.seed,
        )
        assert one.logprobs == alone.logprobs
        assert one.usage.completion_tokens == alone.usage.completion_tokens
    assert many[3].usage.cached_tokens == many[3].usage.prompt_tokens - 1
    assert llm.complete_many([], max_tokens=3) == []
    with pytest.raises(ContextOverflowError, match=r"^prompt 2 of 2 has 3\d\d tokens"):
        llm.complete_many(["The fox", "fox " * 300])
    for one in ("The fox", llm.tokenize("The fox")):
        with pytest.raises(UsageError, match="this is one prompt, and not a list of them"):
            llm.complete_many(one)
    texts = [one.text for one in llm.complete_many(iter(prompts), **options)]  # type: ignore
    assert texts == [one.text for one in many]
    with pytest.raises(UsageError, match="unknown option 'temp': did you mean temperature"):
        llm.complete_many(["The fox"], temp=0.5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="n_parallel must be at least 1, not 0"):
        LLM(path, n_parallel=0)
    for step_ms in (0, -1.0, math.nan):
        with pytest.raises(UsageError, match=f"step_ms must be above 0, not {step_ms}"):
            LLM(path, n_parallel=2, step_ms=step_ms)
    llm.close()
    with pytest.raises(LocalKVError, match="closed"):
        llm.complete_many(["The fox"])


def test_a_stream_that_nobody_refers_to_gives_its_place_to_others(path: Path) -> None:
    """Loops that broke off leave such streams: they would wait for a reader for ever."""
    llm, cancel = LLM(path, n_ctx=200, n_parallel=2), Event()
    for _ in range(3):
        for _piece in llm.stream(PROMPT, ignore_eos=True, cancel=cancel):
            break
    llm.stream("The fox")  # and is not read at all
    stream = llm.stream("The fox", ignore_eos=True)
    next(stream)
    assert llm.batch.scheduler.running == [stream.generation.request]
    assert llm.batch.scheduler.waiting == []
    stream.close()
    assert llm.batch.is_idle
    assert not cancel.is_set()


def test_a_list_is_checked_before_its_first_prompt_is_read(llm: LLM) -> None:
    llm.engine.reset()
    with pytest.raises(ContextOverflowError, match=r"^prompt 2 of 3 has 3\d\d tokens, but the co"):
        llm.complete(["The fox", "fox " * 300, "The fox"])
    with pytest.raises(LocalKVError, match=r"^prompt 2 of 2 has no tokens"):
        llm.complete([[1, 2], []])
    assert llm.engine.cached_ids == []


def test_sampling_options(llm: LLM) -> None:
    params = SamplingParams(temperature=0, seed=1)
    text = llm.complete(PROMPT, max_tokens=5, params=params).text
    assert text == llm.complete(PROMPT, max_tokens=5, temperature=0).text
    changed = llm.complete(PROMPT, max_tokens=5, params=params, temperature=5.0, top_k=0)
    assert changed.text != text
    assert changed.seed == 1
    with pytest.raises(TypeError, match="temprature"):
        llm.complete(PROMPT, temprature=1)
    with pytest.raises(UsageError, match="top_p"):
        llm.complete(PROMPT, top_p=7)


def test_chat(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hello <|user|>"},
    ]
    stream = llm.chat(messages, max_tokens=4, temperature=0)
    text = stream.completion.text
    user = llm.tokenizer.token_to_id("<|user|>")
    ids = llm.engine.cached_ids
    assert ids.count(user) == 1  # the template's; what the user wrote stays text
    assert ids[0] == llm.tokenizer.bos_id
    assert ids.count(llm.tokenizer.bos_id) == 1
    again = llm.chat([*messages, {"role": "assistant", "content": text}], max_tokens=2)
    assert again.completion.usage.cached_tokens > 10


def test_a_text_is_a_users_message(llm: LLM) -> None:
    asked = [{"role": "user", "content": "hello"}]
    texts = {llm.chat(one, max_tokens=4, temperature=0).completion.text for one in ("hello", asked)}
    assert len(texts) == 1
    assert llm.chat_prompt("hello").ids == llm.chat_prompt(asked).ids


def test_what_is_printed(path: Path) -> None:
    with LLM(path, n_ctx=64, cache_type_k="q8_0", cache_type_v="f32", device="cpu") as llm:
        assert repr(llm) == f"<LLM {llm.config.name}: context 64, K/V q8_0/f32, cpu>"
        stream = llm.chat("hello", max_tokens=3, ignore_eos=True, temperature=0)
        assert repr(stream) == "<TextStream: 0 tokens, goes on>"
        done = stream.completion
        assert repr(stream) == "<TextStream: 3 tokens, length>"
        assert repr(llm.chat_prompt("hello")).startswith("<ChatPrompt: ")
        assert repr(done).startswith(f"Completion(text={done.text!r}, finish_reason='length', ")
        assert f"{done.usage.prompt_tokens} + 3 tokens, " in repr(done)
        assert f"{done}" == done.text
    assert repr(llm) == f"<LLM {llm.config.name}: closed>"
    assert repr(LLM.__new__(LLM)) == "<LLM: not loaded>"


def test_a_template_of_ones_own(llm: LLM) -> None:
    template = llm.chat_template_from("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    bos, eos = (
        llm.tokenizer.id_to_token(token) for token in (llm.tokenizer.bos_id, llm.tokenizer.eos_id)
    )
    assert template.render([{"content": "Hi"}]) == f"{bos}Hi{eos}"


def test_model_without_template_or_tokenizer(tmp_path: Path) -> None:
    bare = LLM(write_tiny_model(tmp_path / "bare.gguf", tokenizer=False), n_ctx=8)
    assert bare.logits([1, 2, 3]).shape[0] == 3
    with pytest.raises(ModelFileError, match="tokenizer"):
        bare.tokenize("hello")
    with pytest.raises(ModelFileError, match="tokenizer"):
        bare.complete([1, 2])
    plain = LLM(write_tiny_model(tmp_path / "plain.gguf", template=False), n_ctx=8)
    with pytest.raises(UsageError, match="no chat template"):
        plain.chat([{"role": "user", "content": "hello"}])


def test_context_length(path: Path) -> None:
    assert LLM(path).cache.n_ctx == CONTEXT
    assert LLM(path, n_ctx=0).cache.n_ctx == CONTEXT
    longer = LLM(path, n_ctx=CONTEXT + 1)
    assert longer.cache.n_ctx == CONTEXT + 1
    assert any("longer than the 256" in line for line in longer.warnings)


def test_default_context_is_bounded(tmp_path: Path) -> None:
    path = RandomModel(n_ctx=100_000).write(tmp_path / "model.gguf")
    assert LLM(path).cache.n_ctx == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type_k": "q9_9"}, "unknown K cache type 'q9_9' .localkv complete --help"),
        ({"cache_type_v": "F8"}, "unknown V cache type 'F8'"),
        ({"device": "tpu"}, "unknown device 'tpu'; .* .*auto.*cpu"),
        ({"n_ctx": -1}, "context of -1"),
        ({"n_batch": 0}, "n_batch must be at least 1"),
        ({"n_threads": 0}, "n_threads must be at least 1"),
        ({"n_threads_batch": 0}, "n_threads_batch must be at least 1"),
    ],
)
def test_options_that_make_no_sense(path: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(path, **options)


def test_heads_that_the_cpu_can_not_read(tmp_path: Path) -> None:
    path = RandomModel(head_dim=40).write(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match="head_dim 40 is not a multiple of 16, as the cpu backend"):
        LLM(path)
    assert np.isfinite(LLM(path, device="reference").logits([1, 2])).all()


def test_vocabulary_only(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"vocab.gguf holds no weights"):
        LLM(tmp_path / "vocab.gguf")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        LLM(tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def exact(path: Path) -> np.ndarray:
    """Logits of the prompt with nothing rounded."""
    llm = LLM(path, n_ctx=200, cache_type_k="f32", cache_type_v="f32")
    return llm.logits(llm.tokenize(PROMPT))


@pytest.mark.parametrize(("type_k", "type_v"), quick(PAIRS, [(k, v) for k, v in PAIRS if k == v]))
def test_every_type_in_pairs(
    path: Path, llm: LLM, exact: np.ndarray, type_k: str, type_v: str
) -> None:
    """Both types are used, as on the reference backend, and the cache takes the bytes they say."""
    scales = None
    if wants_scales((type_k, type_v)):
        (scales,) = calibrate(llm.engine.model, [llm.tokenize(PROMPT)], n_ctx=200)
    types = {"cache_type_k": type_k, "cache_type_v": type_v, "kv_sink": 0, "kv_scales": scales}
    llm, reference = (LLM(path, n_ctx=200, device=on, **types) for on in ("cpu", "reference"))
    rows = 256 * llm.config.n_layers * llm.config.groups[0].n_kv_heads
    for side, name in (("k", type_k), ("v", type_v)):
        assert llm.engine.cache.n_bytes(side) == rows * KV_FORMATS[name].row_bytes(64)
    ids = llm.tokenize(PROMPT)
    logits, wanted = llm.logits(ids), reference.logits(ids)
    assert np.linalg.norm(logits - wanted) < 1e-3 * np.linalg.norm(wanted)
    error = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
    if (type_k, type_v) == ("f32", "f32"):
        assert error == 0
    else:
        assert error > 1e-6


def test_devices(path: Path) -> None:
    reference = LLM(path, n_ctx=64, device="reference")
    assert reference.backend.name == "reference"
    ids = reference.tokenize(PROMPT)
    assert np.allclose(LLM(path, n_ctx=64).logits(ids), reference.logits(ids), atol=1e-2)


def test_errors_are_of_one_kind_and_one_line(llm: LLM) -> None:
    with pytest.raises(LocalKVError) as caught:
        llm.complete("fox " * 300)
    assert "\n" not in str(caught.value)
    assert not math.isnan(float(caught.value.exit_code))


def test_tensors_that_nobody_knows_are_named_or_counted(tmp_path: Path) -> None:
    random_model = RandomModel(n_layers=1)
    random_model.tensors |= {f"v.blk.{i}.weight": np.ones(4) for i in range(12)}
    with LLM(random_model.write(tmp_path / "model.gguf"), device="cpu", progress=False) as llm:
        names = ", ".join(f"v.blk.{i}.weight" for i in range(8))
        assert f"tensors that are not used: {names} and 4 others" in llm.warnings
