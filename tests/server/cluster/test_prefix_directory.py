"""Where requests are sent, without engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localkv.server.cluster.prefix_directory import (
    CHARACTERS_PER_TOKEN,
    CHUNK,
    PrefixDirectory,
    prefix_keys,
    ranked,
    text_of,
)


def test_texts_that_begin_alike_share_keys():
    text = "".join(map(str, range(1000)))
    keys, other = prefix_keys(text), prefix_keys(text[: 3 * CHUNK] + "x" * CHUNK)
    assert len(keys) == len(text) // CHUNK
    assert keys[:3] == other[:3]
    assert keys[3] != other[3]
    assert prefix_keys(text[1:])[1] != keys[1]


def test_a_next_turn_goes_where_the_last_was_answered():
    directory = PrefixDirectory()
    first = {"system": "s" * CHUNK, "messages": [{"role": "user", "content": "a" * 900}]}
    following = {**first, "messages": [*first["messages"], {"role": "user", "content": "b" * 900}]}
    (best, *_) = ranked(directory, {"x": 0, "y": 0}, prefix_keys(text_of(first)))
    directory.add(best, prefix_keys(text_of(first)))
    other = "y" if best == "x" else "x"
    loads = {best: 3, other: 0}
    assert ranked(directory, loads, prefix_keys(text_of(following)))[0] == best
    assert ranked(directory, loads, prefix_keys("q" * 900))[0] == other
    assert ranked(directory, {best: 9, other: 0}, prefix_keys(text_of(following)))[0] == other


def test_new_conversations_are_spread():
    directory, loads, chosen = PrefixDirectory(), {"x": 0, "y": 0, "z": 0}, []
    for number in range(6):
        keys = prefix_keys(str(number) * 2 * CHUNK)
        chosen.append(ranked(directory, loads, keys)[0])
        directory.add(chosen[-1], keys)
    assert sorted(chosen) == ["x", "x", "y", "y", "z", "z"]


def test_full_engines_take_turns_by_what_they_lose():
    """No engine's name decides, and one with room comes before one that has to forget."""
    directory, loads, room = PrefixDirectory(), {"x": 0, "y": 0}, 3
    directory.hold("x", room * CHUNK // CHARACTERS_PER_TOKEN)
    directory.hold("y", room * CHUNK // CHARACTERS_PER_TOKEN)
    for number in range(room):
        directory.add("x", prefix_keys(str(number) * CHUNK))
    chosen = []
    for number in range(room, 4 * room):
        keys = prefix_keys(f"{number:02}" * CHUNK)[:1]
        chosen.append(ranked(directory, loads, keys)[0])
        directory.add(chosen[-1], keys)
    assert "".join(chosen) == "yyyxxxyyy"


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.lists(st.integers(0, 3), max_size=6))))
def test_it_knows_what_was_sent_and_forgets_the_oldest(sent: list[tuple[str, list[int]]]):
    directory, room = PrefixDirectory(), 4
    for engine in "xyz":
        directory.hold(engine, room * CHUNK // CHARACTERS_PER_TOKEN)
    for engine, path in sent:
        keys = [bytes(path[:end]) for end in range(1, len(path) + 1)]
        directory.add(engine, keys)
        assert directory.known(keys).get(engine, 0) == min(len(keys), room)
        assert directory.size(engine) <= room
    directory.keep("x")
    assert len(directory) == directory.size("x")
    directory.keep("")
    assert len(directory) == 0
