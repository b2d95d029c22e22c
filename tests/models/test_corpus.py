"""The corpus generator and the files of the shipped model."""

from __future__ import annotations

import itertools
import random
import re
import sys

import gguf
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from support.paths import MODELS

sys.path.insert(0, str(MODELS))

from corpus import make_document, make_row
from document import ASSISTANT, END, SYSTEM, USER, Document, Kind
from probe import PROBE_KINDS, make_probe, probe_series

_GENRES = (
    "story",
    "short story",
    "story chat",
    "rare story chat",
    "personal chat",
    "memory chat",
    "notebook",
    "list",
    "list and stories",
    "repeat",
)
_RECALL_KINDS = (Kind.FACT, Kind.PASSKEY, Kind.VARIABLE, Kind.LIST)
_MARKERS = (SYSTEM, USER, ASSISTANT, END)


class WordEncoder:
    """Stands in for the tokenizer: one id for a word."""

    bos = 1

    def encode_document(self, document: Document) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        kinds: list[int] = []
        for part in document.parts:
            words = part.text.split() or ["\n"]
            ids += [sum(map(ord, word)) for word in words]
            kinds += [int(part.kind)] * len(words)
        return ids, kinds


@pytest.mark.parametrize("genre", _GENRES)
def test_documents_depend_on_the_seed_alone(genre: str) -> None:
    first, second, other = (
        [make_document(random.Random(seed), genre, 200).text for _ in range(3)]
        for seed in (5, 5, 6)
    )
    assert first == second != other


@pytest.mark.parametrize("genre", _GENRES[:7])
def test_text_is_well_formed(genre: str) -> None:
    rng = random.Random(7)
    for _ in range(60):
        for run in make_document(rng, genre, 200).runs():
            assert not re.search(r"[{}()|<>]|  | [.,!?]|\b[Aa] [aeiou]", run), run


@pytest.mark.parametrize("genre", ["story", "short story"])
def test_plain_stories_end_once_and_hold_no_role(genre: str) -> None:
    rng = random.Random(8)
    for _ in range(60):
        markers = [part.text for part in make_document(rng, genre, 200).parts if part.is_marker]
        assert markers == [END]


@pytest.mark.parametrize("genre", ["story chat", "rare story chat", "memory chat"])
def test_every_turn_of_the_assistant_ends(genre: str) -> None:
    rng = random.Random(9)
    for _ in range(60):
        markers = [part.text for part in make_document(rng, genre, 200).parts if part.is_marker]
        for marker, following in zip(markers, [*markers[1:], USER], strict=True):
            assert (following == END) is (marker == ASSISTANT)


def test_a_story_tells_of_whom_its_prompt_asks() -> None:
    rng = random.Random(10)
    for _ in range(60):
        document = make_document(rng, "rare story chat", 200)
        text = document.text
        asked = re.search(r"about an? (?:\w+ )?(\w+) (?:named|called) (\w+)", text)
        cued = {part.text.strip() for part in document.parts if part.kind == Kind.CUE}
        if asked:
            assert set(asked.groups()) <= cued


@pytest.mark.parametrize("genre", ["notebook", "memory chat", "personal chat", "list"])
def test_every_answer_was_told_before(genre: str) -> None:
    rng = random.Random(11)
    for _ in range(40):
        told: set[str] = set()
        for part in make_document(rng, genre, 300).parts:
            value = part.text.strip()
            if part.kind in _RECALL_KINDS:
                assert value in told
            told |= {value, *re.findall(r"\w+", value)}


@pytest.mark.parametrize("length", [64, 257])
def test_rows_are_cut_to_their_length(length: int) -> None:
    mixture = {"story": 1.0, "notebook": 1.0}
    ids, kinds = make_row(random.Random(12), WordEncoder(), mixture, length)
    assert len(ids) == len(kinds) == length
    assert ids[0] == WordEncoder.bos


@pytest.mark.parametrize("kind", PROBE_KINDS)
def test_probes_keep_their_distance(kind: str) -> None:
    probe = make_probe(random.Random(13), WordEncoder(), kind, 300)
    assert 300 <= probe.distance <= 330
    assert probe.answer[0] in probe.prompt


def test_series_of_probes_share_their_beginnings() -> None:
    distances = (300, 50, 120)
    series = probe_series(random.Random(14), WordEncoder(), distances, n_facts=6)
    assert [distance for distance, _ in series] == [50] * 6 + [120] * 6 + [300] * 6
    for distance, probe in series:
        assert distance < probe.distance
        told = probe.prompt.index(probe.answer[0])  # a value is told once, before all else
        assert len(probe.prompt) - told == probe.distance
    by_distance = [[p for d, p in series if d == distance] for distance in sorted(distances)]
    assert len({tuple(probe.answer) for probe in by_distance[0]}) == 6
    for probes, farther in itertools.pairwise(by_distance):
        assert [probe.answer for probe in probes] == [probe.answer for probe in farther]
        shared = [shared_length(a.prompt, b.prompt) for a in probes for b in probes if a is not b]
        assert min(shared) > probes[0].prompt.index(probes[-1].answer[0])
        between = [shared_length(a.prompt, b.prompt) for a, b in zip(probes, farther, strict=True)]
        assert min(between) >= min(shared) - 1  # but for "Question:"


def shared_length(a: list[int], b: list[int]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


@pytest.mark.parametrize("suffix", ["F16", "Q8_0"])
def test_model_file_has_what_a_runtime_needs(suffix: str) -> None:
    reader = gguf.GGUFReader(MODELS / f"tales-4M-{suffix}.gguf")

    def field(name: str) -> object:
        return reader.fields[name].contents()

    assert field("general.architecture") == "llama"
    tokens = field("tokenizer.ggml.tokens")
    types = field("tokenizer.ggml.token_type")
    assert [tokens.index(marker) for marker in _MARKERS] == [3, 4, 5, 2]
    assert [types[tokens.index(marker)] for marker in _MARKERS] == [3, 3, 3, 3]
    assert field("tokenizer.ggml.eos_token_id") == 2
    template = ImmutableSandboxedEnvironment().from_string(field("tokenizer.chat_template"))
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "A story, please."},
    ]
    assert template.render(
        messages=messages, bos_token="<s>", eos_token=END, add_generation_prompt=True
    ) == (
        "<s><|system|>Be kind.<|user|>Hello!<|assistant|>Hi!</s>"
        "<|user|>A story, please.<|assistant|>"
    )


def test_folder_stays_small() -> None:
    files = [path for path in MODELS.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16 * 2**20
