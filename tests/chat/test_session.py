"""Conversations, sessions and what is stored of them."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import group_layouts
from localkv.chat.cache_figures import cache_figures, larger_cache
from localkv.chat.conversation import split_reasoning
from localkv.chat.engine import Finished
from localkv.chat.session import ChatSession, export, to_json, to_markdown
from localkv.chat.store import Store
from localkv.config import CacheConfig
from localkv.errors import ContextOverflowError, LocalKVError, UsageError
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.quant_formats import TOKEN_FORMATS
from localkv.sampling.params import SamplingParams
from support.fake_engine import FACTS, FakeEngine, count_words
from support.held_bytes import storages

DONE = Finished("stop", 5, 7, 3, 0.1, 0.2, 35.0, 42)


def new_session(store: Store, **options: object) -> ChatSession:
    return ChatSession(store, model="m.gguf", **{"params": SamplingParams(), **options})


def exchange(session: ChatSession, question: str, answer: str) -> None:
    session.say(question)
    message = session.begin_answer()
    session.extend(message, answer)
    session.finish(message, DONE)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "still_open"),
    [
        ("", "", "", False),
        ("Yes.", "", "Yes.", False),
        ("<thi", "", "", True),
        ("  <think", "", "", True),
        ("<b>", "", "<b>", False),
        ("<think>\nHm", "Hm", "", True),
        ("<think>\nHm</thi", "Hm", "", True),
        ("<think>\nHm\n</think>\n\nYes.", "Hm", "Yes.", False),
        ("<think>\n\n</think>\n\nYes.", "", "Yes.", False),
        ("Say <think> and </think>", "", "Say <think> and </think>", False),
        ("<think>a</think>b</think>c", "a", "b</think>c", False),
        ("<|channel>thought\nHm\n<channel|>Yes.", "Hm", "Yes.", False),
        ("<|inner_prefix|>Hm<|inner_suffix|>Yes.", "Hm", "Yes.", False),
        ("<seed:think>Hm</seed:think>Yes.", "Hm", "Yes.", False),
        ("[THINK]Hm[/THINK]Yes.", "Hm", "Yes.", False),
        ("<think>Hm</think>\n<answer>\nYes.\n</answer>", "Hm", "Yes.", False),
        ("<think>Hm</think><response>Yes", "Hm", "Yes", False),
        ("<think>Hm</think><response>Yes</resp", "Hm", "Yes", False),
        ("<think>Hm</think>\n\n<resp", "Hm", "", False),
        ("<answer>Yes</answer>", "", "<answer>Yes</answer>", False),
    ],
)
def test_reasoning(text: str, reasoning: str, answer: str, still_open: bool) -> None:
    parts = split_reasoning(text)
    assert (parts.reasoning, parts.answer, parts.open) == (reasoning, answer, still_open)


def test_what_is_shown_only_grows() -> None:
    text = " <think>\nOne <b> two\n</think>\n\nThree </think> four"
    shown = ""
    for end in range(len(text) + 1):
        answer = split_reasoning(text[:end]).answer
        assert answer.startswith(shown)
        shown = answer
    assert shown == "Three </think> four"


def test_earlier_reasoning_is_left_to_the_template(store: Store) -> None:
    session = new_session(store)
    exchange(session, "Q", "<think>\nHm\n</think>\n\nA1")
    exchange(session, "Q2", "<think>\nnever answered")
    exchange(session, "Q3", "A3")
    answers = [m for m in session.conversation.prompt("") if m["role"] == "assistant"]
    assert answers == [
        {"role": "assistant", "content": "A1", "reasoning_content": "Hm"},
        {"role": "assistant", "content": "A3"},
    ]


def test_branches_survive_the_store(store: Store) -> None:
    session = new_session(store)
    exchange(session, "Q", "A1")
    answer = session.conversation.path()[-1]
    session.retry(answer)
    again = session.begin_answer()
    session.extend(again, "A2")
    session.finish(again, DONE)
    exchange(session, "Q2", "A3")
    session.show_branch(answer)
    assert [m.content for m in session.conversation.path()] == ["Q", "A1"]
    session.show_branch(again)
    assert [m.content for m in session.conversation.path()] == ["Q", "A2", "Q2", "A3"]
    resumed = new_session(store).resumed(session.id)
    assert resumed.conversation == session.conversation
    assert resumed.conversation.path()[-1].stats == DONE
    assert [m.content for m in resumed.conversation.branches(answer)] == ["A1", "A2"]


def test_editing_the_first_message_is_a_branch_too(store: Store) -> None:
    session = new_session(store)
    exchange(session, "Q", "A")
    session.edit(session.conversation.path()[0], "Q!")
    assert [m.content for m in session.conversation.path()] == ["Q!"]
    assert len(session.conversation.branches(session.conversation.path()[0])) == 2
    assert session.title == "Q"


def test_a_prompt_has_no_reasoning_and_no_empty_answer(store: Store) -> None:
    session = new_session(store, system_prompt=" ")
    exchange(session, "Q", "<think>\nHm\n</think>\n\nA")
    exchange(session, "Q2", "<think>\ncut")
    session.say("Q3")
    session.begin_answer()
    assert [m["content"] for m in session.request().messages] == ["Q", "A", "Q2", "Q3"]
    session.system_prompt = "S"
    assert session.request().messages[0] == {"role": "system", "content": "S"}


def test_the_title_is_the_first_line_that_says_something(store: Store) -> None:
    session = new_session(store)
    session.say("\n  Hello\tthere \nmore")
    assert session.title == "Hello there"
    session.rename(" ")
    assert session.title == "Hello there"


def test_nothing_is_stored_before_something_is_said(store: Store) -> None:
    session = new_session(store)
    session.save()
    session.set_param("top_k", 3)
    assert session.store.sessions() == []


@pytest.mark.parametrize("n_ctx", [20, 30, 60])
def test_dropping_turns_leaves_a_quarter_free(store: Store, n_ctx: int) -> None:
    session = new_session(store, system_prompt="s s")
    for number in range(6):
        exchange(session, f"question {number}", f"answer {number}")
    session.say("last")
    n_dropped = session.drop_oldest_turns(n_ctx, FakeEngine().count_tokens)
    messages = session.request().messages
    assert count_words(messages) <= n_ctx * 3 // 4
    assert messages[0]["role"] == "system"
    assert messages[1] == {"role": "user", "content": f"question {n_dropped}"}
    # one fewer would not have been enough
    turn = count_words(messages[1:3])
    assert n_dropped == 0 or count_words(messages) + turn > n_ctx * 3 // 4
    assert len(session.conversation.path()) == 13


def test_a_last_turn_that_is_too_long_drops_nothing(store: Store) -> None:
    session = new_session(store)
    exchange(session, "Q", "A")
    session.say("word " * 50)
    with pytest.raises(ContextOverflowError, match="the last message alone takes 52 of 40"):
        session.drop_oldest_turns(40, FakeEngine().count_tokens)
    assert session.conversation.dropped_id is None


def test_search_finds_titles_and_messages_literally(store: Store) -> None:
    for question, answer in (("Fox one", "100% sure_ly"), ("Owl two", "日本語 \\ backslash")):
        exchange(new_session(store), question, answer)
    assert [s.title for s in store.sessions()] == ["Owl two", "Fox one"]
    for search, titles in {
        "fox": ["Fox one"],
        "日本": ["Owl two"],
        "%": ["Fox one"],
        "_": ["Fox one"],
        "\\": ["Owl two"],
        "one sure": ["Fox one"],
        "one two": [],
    }.items():
        assert [s.title for s in store.sessions(search)] == titles, search


def test_deleting_takes_the_messages_along(store: Store) -> None:
    session = new_session(store)
    exchange(session, "Q", "A")
    session.store.delete_session(session.id)
    assert session.store.prompts() == []
    with pytest.raises(LocalKVError, match="there is no session"):
        session.store.session(session.id)


def test_the_file_is_made_shared_and_versioned(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "chats.sqlite3"
    one, two = Store(path), Store(path)
    exchange(new_session(one), "Q", "A")
    exchange(new_session(two), "Q2", "A2")
    assert len(one.sessions()) == len(two.sessions()) == 2
    one.set_preference("theme", "a")
    two.set_preference("theme", "b")
    assert one.preference("theme") == "b"
    one.close()
    two.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LocalKVError, match="made by a newer localkv"):
        Store(path)


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "chats"
    path.write_text("no database at all, but text" * 100)
    with pytest.raises(LocalKVError, match="file is not a database"):
        Store(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(LocalKVError, match="unable to open"):
        Store(tmp_path / "folder")


def test_settings_are_stored_as_far_as_they_differ(store: Store) -> None:
    params = SamplingParams(temperature=0.1, logit_bias={5: float("-inf")}, samplers=("top_k",))
    session = new_session(store, params=params, max_tokens=9)
    session.say("Q")
    assert set(session.store.session(session.id).settings) == {
        "temperature",
        "logit_bias",
        "samplers",
        "max_tokens",
    }
    resumed = new_session(store).resumed(session.id)
    assert (resumed.params, resumed.max_tokens) == (params, 9)


def test_export_holds_all_branches_or_the_shown_one(store: Store, tmp_path: Path) -> None:
    session = new_session(store, system_prompt="Be brief.")
    exchange(session, "Q", "A1")
    session.retry(session.conversation.path()[-1])
    message = session.begin_answer()
    session.extend(message, "A2 \ud83d")
    markdown = to_markdown(session)
    assert "A1" not in markdown
    assert "**System:** Be brief." in markdown
    assert "*(interrupted)*" in markdown
    facts = json.loads(to_json(session))
    assert [m["content"][:2] for m in facts["messages"]] == ["Q", "A1", "A2"]
    assert facts["shown"] == [facts["messages"][0]["id"], facts["messages"][2]["id"]]
    export(session, tmp_path / "a.md")
    with pytest.raises(UsageError, match="exists already"):
        export(session, tmp_path / "a.md")


def test_cache_figures_are_those_of_the_blocks() -> None:
    for name, fmt in TOKEN_FORMATS.items():
        figures = cache_figures(replace(FACTS, kv_sink=0), type_k=name, type_v="f32")
        assert figures.bytes_k == 16 * 8 * 1024 * fmt.row_bytes(64)
        assert figures.bytes_v == 16 * 8 * 1024 * 64 * 4
        assert figures.f16_bytes == 2 * 16 * 8 * 1024 * 64 * 2


@pytest.mark.parametrize("name", ["f16", "q4_0", "kv2_1c", "nuq3"])
def test_cache_figures_are_those_of_what_is_allocated(name: str) -> None:
    """Tail and sink, scales and pages included."""
    facts = replace(FACTS, kv_tail=70, kv_sink=5, n_batch=100)
    figures = cache_figures(facts, type_k=name, type_v="q4_0", n_ctx=700)
    cache = CacheConfig(name, "q4_0", n_ctx=700, kv_tail=70, kv_sink=5)
    layouts = group_layouts(cache, facts.groups)
    allocated = KVCache(layouts, n_ctx=700, n_batch=100, arrays=NumpyArrays())
    assert (figures.bytes_k, figures.bytes_v) == (
        storages(allocated, "k"),
        storages(allocated, "v"),
    )


def test_other_types_come_without_the_tail_of_types_by_layer() -> None:
    """What a profile's types were measured with is not what one pair for all layers has."""
    by_layer = replace(FACTS, pairs=("q4_0/q4_0",), kv_tail=64, kv_sink=4)
    plain = replace(FACTS, kv_tail=None, kv_sink=None)
    alike = {"type_k": "q4_0", "type_v": "q4_0"}
    assert cache_figures(by_layer, **alike) == cache_figures(plain, **alike)
    assert cache_figures(by_layer).n_bytes > cache_figures(plain, **alike).n_bytes


def test_a_page_that_is_begun_is_counted() -> None:
    assert cache_figures(FACTS, n_ctx=257).n_bytes == cache_figures(FACTS, n_ctx=512).n_bytes


@pytest.mark.parametrize(
    ("types", "n_ctx", "offer"),
    [
        (("f16", "f16"), 1024, (2048, "q8_0", "q5_0")),
        (("q4_0", "q8_0"), 1024, (2048, "q4_0", "q4_0")),
        (("f16", "f16"), 3000, (4096, "q8_0", "q8_0")),
    ],
)
def test_a_larger_context_takes_the_most_exact_types_that_fit(
    types: tuple[str, str], n_ctx: int, offer: tuple[int, str, str]
) -> None:
    facts = replace(FACTS, type_k=types[0], type_v=types[1], n_ctx=n_ctx)
    found = larger_cache(facts)
    assert found is not None
    assert (found.n_ctx, found.type_k, found.type_v) == offer


def test_no_context_is_larger_than_the_model_knows() -> None:
    assert larger_cache(replace(FACTS, n_ctx=4096)) is None


def test_small_heads_are_offered_only_what_they_can_be_kept_in() -> None:
    found = larger_cache(
        replace(FACTS, key_dims=(16,), value_dims=(16,), type_k="f16", type_v="f16")
    )
    assert found is not None
    assert (found.type_k, found.type_v) == ("f16", "f16")
