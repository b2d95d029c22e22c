"""Texts in files: the same bits afterwards, on any backend; and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from localkv.cache.row_copies import held_rows, planes, rows_out
from localkv.config import CacheConfig, KVCodebook
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.prefix import Text
from localkv.engine.saved_state import choices_json, load_state, save_state
from localkv.engine.state_file import StateFile, StateTensor, in_parts, write_state
from localkv.errors import LocalKVError, UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.llm import LLM
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.dense_variants import DENSE, dense_variant
from support.expert_models import EXPERT_MODELS
from support.hybrid_models import KEYS as HYBRIDS
from support.hybrid_models import hybrid
from support.latent_models import latent_tensors, write_latent
from support.paths import ROOT
from support.quick import quick
from support.random_model import variant

N_CTX = 768
IDENTITY = {"architecture": "a", "model_name": "M", "model": "1", "rope": "[]", "smoothing": ""}
IDS = np.random.default_rng(3).integers(96, size=700).tolist()
BOOKS = tuple(KVCodebook(i, side, (-20, -3, 4, 30)) for i in (0, 1) for side in "kv")
CACHES = {
    "f16": CacheConfig(n_ctx=N_CTX),
    "packed": CacheConfig("q8_0", "q5_1", n_ctx=N_CTX),
    "tail": CacheConfig("q4_0", "q8_0", n_ctx=N_CTX, kv_tail=40, kv_sink=3),
    "channels": CacheConfig("q4_1c", "q4_1", n_ctx=N_CTX),
    "long groups": CacheConfig("kv3_1c128", "kv2_0", n_ctx=N_CTX),
    "codebooks": CacheConfig("nuq2", "nuq2", n_ctx=N_CTX, kv_codebooks=BOOKS),
    "sink": CacheConfig("kv3_0", "kv2_1", n_ctx=N_CTX),
}
CONVERTED = {
    "packed": (CacheConfig("f32", "f32", n_ctx=N_CTX), CACHES["packed"]),
    "tail": (CacheConfig("f32", "f32", n_ctx=N_CTX), CACHES["tail"]),
    "channels": (CacheConfig("f32", "f32", n_ctx=N_CTX), CACHES["channels"]),
    "codebooks": (CacheConfig("f32", "f32", n_ctx=N_CTX, kv_codebooks=BOOKS), CACHES["codebooks"]),
}
EXPERTS = ("muse-glimmer", "step35", "laguna", "laguna-m", "mimo2", "maple", "spark2_5")
"""Experts beside windows, gates, sinks and heads of V of another width."""
Load = Callable[..., Transformer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder, models = tmp_path_factory.mktemp("states"), dict[tuple[str, str], Transformer]()

    def load(name: str, backend: str = "cpu") -> Transformer:
        if (name, backend) not in models:
            path = folder / f"{name}.gguf"
            if name == "plm":
                write_latent(path, name, latent_tensors(name))
            elif not path.exists():
                model = hybrid(name) if name in HYBRIDS else EXPERT_MODELS.get(name)
                dense = dense_variant if name in DENSE else variant
                (model or dense(name)).write(path)
            made = {"cpu": cpu_backend, "reference": reference_backend}[backend]()
            models[name, backend] = load_model(path, made)[0]
        return models[name, backend]

    return load


def answer(engine: Engine, ids: list[int], n: int = 5) -> tuple[list[int], int]:
    """Tokens drawn after a prompt, and how many of the prompt's were reused."""
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=engine.model.config.n_vocab)
    generation = BatchEngine(engine).generate(ids, GenerationOptions(sampler=sampler, max_tokens=n))
    return list(generation), generation.stats.n_reused


def logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """The logits of a prompt's last token, and of a generated one after it."""
    text = Text(list(ids), len(ids))

    def work() -> list[np.ndarray]:
        rows = []
        for token in (7, 11):
            engine.slot.take(text)
            found = engine.slot.logits(text)
            rows.append(np.array(engine.model.backend.arrays.to_numpy(found)))
            text.ids.append(token)
        return rows

    return np.concatenate(engine.slot.turn(work))


@pytest.mark.parametrize(
    ("name", "cache", "n_prompt"),
    quick(
        [
            *(("llama", cache, n) for cache in CACHES for n in (300, 530)),
            *((name, "packed", n) for name in ("gemma3", "qwen35", "plm") for n in (300, 690)),
            ("gemma3", "channels", 600),
            *((name, "packed", 300) for name in HYBRIDS if name != "qwen35"),
            *((name, "packed", 690) for name in ("bloom", "bitnet")),
            *((name, cache, 690) for name in EXPERTS for cache in ("packed", "tail")),
        ],
        [("llama", "tail", 300), ("gemma3", "channels", 600), ("mimo2", "tail", 690)],
    ),
)
def test_a_text_goes_on_with_the_same_bits(
    load: Load, tmp_path: Path, name: str, cache: str, n_prompt: int
) -> None:
    """After an answer, from where the next prompt differs: as in the engine that saved it."""
    config = CACHES[cache]
    first = Engine(load(name), config, n_batch=128)
    drawn, _ = answer(first, IDS[:n_prompt])
    n_saved = save_state(first.slot, tmp_path / "state", IDENTITY)
    assert n_saved == n_prompt + len(drawn) - 1
    second = Engine(load(name), replace(config, n_ctx=2 * N_CTX), n_batch=96)
    answer(second, IDS[40:80])
    assert len(load_state(second.slot, tmp_path / "state", IDENTITY)) == n_saved
    longer = [*IDS[:n_prompt], 1, 2, 3]
    ours, theirs = logits(first, longer), logits(second, longer)
    assert ours.tobytes() == theirs.tobytes()
    assert answer(second, IDS[:n_prompt]) == answer(first, IDS[:n_prompt])
    assert answer(second, IDS[:n_prompt])[1] >= n_prompt - 8


def test_files_are_safetensors_in_the_references_order(load: Load, tmp_path: Path) -> None:
    """Another reader finds them, and the CPU finds what the reference stored."""
    config = CACHES["tail"]
    engine = Engine(load("llama", "reference"), config, n_batch=128)
    drawn, _ = answer(engine, IDS[:300])
    save_state(engine.slot, tmp_path / "state", IDENTITY)
    tensors = load_file(tmp_path / "state")
    assert tensors["tokens.ids"].tolist() == IDS[:300] + drawn[:-1]
    assert tensors["tokens.generated"].tolist() == [0] * 300 + [1] * (len(drawn) - 1)
    segment = engine.cache.layers[0].segments[1]
    pages = engine.sequence.pages[engine.cache.parts[1].pool]
    rows = np.concatenate([segment.k[1][page].numpy().swapaxes(0, 1) for page in pages])
    found = tensors["layers.0.segments.1.k.qs"]
    assert (found == rows[: len(found)]).all()
    assert len(found) == 300 + len(drawn) - 1 - 3
    other = Engine(load("llama"), config, n_batch=128)
    load_state(other.slot, tmp_path / "state", IDENTITY)
    again = answer(other, IDS[:300])
    assert again[1] == 299
    save_state(other.slot, tmp_path / "again", IDENTITY)
    theirs = load_file(tmp_path / "again")
    for name, rows in tensors.items():
        if name.startswith("layers"):
            assert (theirs[name][:296] == rows[:296]).all(), name


def test_what_nobody_stored_is_not_written(load: Load, tmp_path: Path) -> None:
    """Rows of other texts in the same pages, between a sink and a tail and behind the end."""
    config = CacheConfig("q4_1c", "q4_1", n_ctx=N_CTX, kv_tail=40, kv_sink=3)
    engine = Engine(load("llama"), config, n_batch=128)
    for layer in engine.cache.layers:
        for segment in layer.segments:
            for plane in (*segment.k, *segment.v):
                plane[:] = 0xAB
    answer(engine, IDS[:50])
    for plane in planes(engine.cache):
        held = held_rows(engine.cache, engine.sequence)[plane.pool]
        (rows,) = rows_out(engine.cache, engine.sequence, plane, held)
        if plane.segment == 2:
            assert not rows[3:32].any()
            assert len(rows) == 54 + 29
        else:
            assert len(rows) == 32
        assert not (rows == 0xAB).reshape(len(rows), -1).all(1).any()


@pytest.mark.parametrize(
    ("name", "types"),
    quick(
        [*(("llama", types) for types in CONVERTED), ("gemma3", "packed"), ("plm", "packed")],
        [("llama", "tail"), ("llama", "channels")],
    ),
)
def test_rows_in_other_types_are_packed_as_they_would_have_been(
    load: Load, tmp_path: Path, name: str, types: str
) -> None:
    """From float32 the first layer's rows are as in a cache that had these types at once.

    The way back is as near as the types are.
    """
    before, after = CONVERTED[types]
    first, native, second, third = (
        Engine(load(name, "reference"), config, n_batch=128)
        for config in (before, after, after, before)
    )
    identity, other = (IDENTITY | {"choices": choices_json(config)} for config in (before, after))
    ids, path = IDS[:330], tmp_path / "state"
    answer(first, ids, 1)
    save_state(first.slot, path, identity)
    with pytest.raises(UsageError, match=r"K and V are .*convert=True"):
        load_state(second.slot, path, other)
    notes = list[str]()
    again = load_state(second.slot, path, other, convert=after, on_note=notes.append)
    assert again == ids
    assert notes[0].startswith("K and V were converted from '0-")
    save_state(second.slot, tmp_path / "converted", other)
    answer(native, ids, 1)
    save_state(native.slot, tmp_path / "native", other)
    ours, theirs = load_file(tmp_path / "converted"), load_file(tmp_path / "native")
    assert ours.keys() == theirs.keys()
    for tensor, rows in theirs.items():
        if tensor.startswith("layers.0."):
            assert rows.tobytes() == ours[tensor].tobytes(), tensor
    assert answer(second, ids)[1] >= 328
    load_state(third.slot, tmp_path / "converted", other, convert=before)
    save_state(third.slot, tmp_path / "back", identity)
    there, back = load_file(path), load_file(tmp_path / "back")
    rows = "layers.0.segments.0.k." + first.cache.layers[0].segments[0].format_k.planes[0].name
    was, now = (found[rows].view(np.float32).astype(np.float64) for found in (there, back))
    assert ((was - now) ** 2).sum() < 0.5 * (was**2).sum()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "2", "another model"),
        ("version", "2", "version '2' is not supported"),
        ("kind", "x", "not a saved state"),
        ("rope", "[1]", "RoPE"),
        ("smoothing", "1", "smoothed"),
        ("layers", "[]", "another rotation, tail or sink"),
        ("scales", "1", "other scales"),
        ("codebooks", "1", "other codebooks"),
        ("text", '{"n_tokens": 3}', "damaged"),
    ],
)
def test_others_are_refused_by_name(
    load: Load, tmp_path: Path, key: str, value: str, words: str
) -> None:
    engine = Engine(load("llama"), CACHES["packed"], n_batch=128)
    answer(engine, IDS[:20])
    save_state(engine.slot, tmp_path / "state", IDENTITY)
    file = StateFile(tmp_path / "state")
    tensors = [
        StateTensor(name, "U8", (1,), in_parts(np.zeros(1, np.uint8))) for name in file._tensors
    ]
    write_state(tmp_path / "other", file.metadata | {key: value}, tensors)
    with pytest.raises(UsageError, match="other: ") as error:
        load_state(engine.slot, tmp_path / "other", IDENTITY)
    assert words in str(error.value)


def test_former_names_of_types(load: Load, tmp_path: Path) -> None:
    """A state from before types were renamed goes on as one with today's names."""
    engine = Engine(load("llama"), CacheConfig("kv3_1c", "kv2_0", n_ctx=N_CTX), n_batch=128)
    answer(engine, IDS[:100])
    n_saved = save_state(engine.slot, tmp_path / "state", IDENTITY)
    file = StateFile(tmp_path / "state")
    tensors = [
        StateTensor(name, dtype, shape, in_parts(file.tensor(name)))
        for name, (dtype, shape, _) in file._tensors.items()
    ]
    older = {
        key: text.replace("kv3_1c", "q3_1c").replace("kv2_0", "q2_0")
        for key, text in file.metadata.items()
    }
    assert older["types"].endswith(" q3_1c/q2_0")
    write_state(tmp_path / "older", older, tensors)
    assert StateFile(tmp_path / "older").metadata == file.metadata
    other = Engine(load("llama"), CacheConfig("kv3_1c", "kv2_0", n_ctx=N_CTX), n_batch=128)
    assert len(load_state(other.slot, tmp_path / "older", IDENTITY)) == n_saved


def test_a_context_that_is_too_small_and_texts_without_room(load: Load, tmp_path: Path) -> None:
    engine = Engine(load("llama"), CACHES["packed"], n_batch=128)
    with pytest.raises(UsageError, match="no text was evaluated"):
        save_state(engine.slot, tmp_path / "state", IDENTITY)
    answer(engine, IDS[:300])
    save_state(engine.slot, tmp_path / "state", IDENTITY)
    with pytest.raises(UsageError, match=r"cannot be written: .*No such file"):
        save_state(engine.slot, tmp_path / "none" / "state", IDENTITY)
    assert answer(engine, IDS[:300])[1] == 299
    small = Engine(load("llama"), replace(CACHES["packed"], n_ctx=256), n_batch=128)
    with pytest.raises(UsageError, match="304 tokens, but the context holds 256"):
        load_state(small.slot, tmp_path / "state", IDENTITY)
    other = Engine(load("llama"), CACHES["f16"], n_batch=128)
    with pytest.raises(UsageError, match="K and V are '0-1 q8_0/q5_1', not '0-1 f16/f16'"):
        load_state(other.slot, tmp_path / "state", IDENTITY)
    for _ in range(4):  # what was there goes
        answer(engine, IDS[300:690])
        load_state(engine.slot, tmp_path / "state", IDENTITY)
    assert answer(engine, IDS[:300])[1] == 299


def test_a_save_that_fails_leaves_the_old_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(load("llama"), CACHES["packed"], n_batch=128)
    answer(engine, IDS[:30])
    path = tmp_path / "state"
    save_state(engine.slot, path, IDENTITY)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        save_state(engine.slot, path, IDENTITY)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert answer(engine, IDS[:30])[1] == 29


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A copy with a change that is none to a reader of JSON, hardly ever."""
    out = bytearray(data)
    n_header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(min(n_header if rng.random() < 0.7 else len(data), len(out)) or 1)
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes(b ^ 1 << rng.randrange(8) for b in out[at : at + 1])
            case 1:
                out[at : at + 8] = rng.choice([0, 1, 1 << 31, 1 << 62, (1 << 64) - 1]).to_bytes(8)
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                del out[at:]
            case 5:
                out[:8] = rng.randrange(1 << rng.choice((8, 20, 40, 64))).to_bytes(8, "little")
    return bytes(out)


def numbers_changed(metadata: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Lengths and places that are not the text's, in a file whose digests are right."""
    if rng.random() < 0.3:
        return metadata | choices_changed(metadata, rng)
    text = json.loads(metadata["text"])
    values = [-1, 0, 1, 2, 255, 256, 300, 304, 1 << 31, 1 << 63, None, "1", 1.5, True, [], {}]
    key = rng.choice(list(text))
    if isinstance(text[key], list) and rng.random() < 0.8:
        text[key].insert(rng.randrange(len(text[key]) + 1), rng.choice([*values, [0], [1]]))
    elif isinstance(text[key], list) and text[key]:
        text[key][0] = rng.choice([*values, [0], [0, 1], [1 << 40]])
    else:
        text[key] = rng.choice(values)
    return metadata | {"text": json.dumps(text)}


def choices_changed(metadata: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Types that would have to be converted, if there were such."""
    choices = json.loads(metadata["choices"])
    values = ["q8_0", "q4_1c", "none", "", None, 7, -1, 1 << 40, True, [], {}, [["f16", "f16"]]]
    choices[rng.choice([*choices])] = rng.choice(values)
    return {"choices": json.dumps(choices), "layers": "[]"}


@pytest.mark.parametrize("count", quick([40, 1500, 4000], [40], [40, 1500]))
def test_damaged_files_change_nothing(load: Load, tmp_path: Path, count: int) -> None:
    """A clear error, and the same answers as before; whether bytes or numbers are others."""
    engine = Engine(load("gemma3"), CACHES["tail"], n_batch=128)
    expected, _ = answer(engine, IDS[:300])
    path, other = tmp_path / "state", tmp_path / "damaged"
    save_state(engine.slot, path, IDENTITY | {"choices": choices_json(CACHES["tail"])})
    data, file = path.read_bytes(), StateFile(path)
    tensors = [
        StateTensor(name, dtype, shape, in_parts(file.tensor(name)))
        for name, (dtype, shape, _) in file._tensors.items()
    ]
    n_loaded = 0
    for seed in range(count):
        rng = random.Random(seed)
        if seed % 2:
            other.write_bytes(mutated(data, rng))
        else:
            write_state(other, numbers_changed(file.metadata, rng), tensors)
        with suppress(LocalKVError):
            load_state(engine.slot, other, IDENTITY, convert=CACHES["tail"])
            n_loaded += 1
        if seed % 50 == 0:
            assert answer(engine, IDS[:300])[0] == expected
    assert answer(engine, IDS[:300])[0] == expected
    assert n_loaded < count / 4


def test_models_of_their_own_and_requests_beside_each_other(tmp_path: Path) -> None:
    """A state serves several requests at the same time, and no other model of the same shape."""
    path, tales = tmp_path / "state", ROOT / "models" / "tales-4M-Q8_0.gguf"
    story = "Once upon a time there was a fox who lived in the hills with a very old bear. "
    prompts = [story + "One day", story + "The bear"]
    greedy = SamplingParams(temperature=0.0)
    with LLM(tales, n_ctx=512, n_parallel=2, progress=False) as llm:
        expected = llm.complete_many(prompts, max_tokens=8, params=greedy)
        llm.engine.reset()
        llm.complete(story, max_tokens=1)
        n_saved = llm.save_state(path)
        llm.engine.reset()
        assert len(llm.load_state(path)) == n_saved
        found = llm.complete_many(prompts, max_tokens=8, params=greedy)
        assert [one.text for one in found] == [one.text for one in expected]
        assert min(one.usage.cached_tokens for one in found) >= n_saved - 2
        llm.save_state(path)
        assert llm.load_state(path)[:-7] in [llm.tokenize(prompt) for prompt in prompts]
    data = bytearray(tales.read_bytes())
    data[-40] ^= 1  # of the last tensor
    (tmp_path / "other.gguf").write_bytes(data)
    with (
        LLM(tmp_path / "other.gguf", n_ctx=512, progress=False) as llm,
        pytest.raises(UsageError, match="another model"),
    ):
        llm.load_state(path)


def test_the_text_that_is_held_is_found_by_its_tokens(tmp_path: Path) -> None:
    """So is a kept text; tokens that no text begins with are refused."""
    with LLM(ROOT / "models/tales-4M-Q8_0.gguf", n_ctx=1024, device="cpu", progress=False) as llm:
        first, second = (llm.tokenize(f"{name} had a red box") for name in ("Once Mia", "Tom"))
        for ids in (first, second):
            llm.complete(ids, max_tokens=3)
        for ids in (second, first):
            llm.save_state(tmp_path / "state", ids)
            with LLM(llm.gguf.path, n_ctx=1024, device="cpu", progress=False) as other:
                assert other.load_state(tmp_path / "state")[: len(ids)] == ids
        with pytest.raises(UsageError, match="no text was evaluated"):
            llm.save_state(tmp_path / "none", [first[0] + 1, 7, 9])
