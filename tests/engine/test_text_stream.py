"""Stop strings and the end of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.engine.stream import LineEnd, LineLimits, StopStrings


def push_all(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    stop_strings = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(stop_strings.push(piece))
        if stop_strings.hit:
            return out, True
    return [*out, stop_strings.flush()], False


def test_held_back_only_as_long_as_needed() -> None:
    assert push_all(["a\n", "b", "\n", "\nc"], ["\n\n"]) == (["a", "\nb", "", ""], True)
    assert push_all(["x<", "e", "nd", ">y"], ["<end>", "never"])[0] == ["x", "", "", ""]
    assert push_all(["x<", "e", "at>"], ["<end>"]) == (["x", "", "<eat>", ""], False)
    assert push_all(["aab"], ["ab"]) == (["a"], True)


def test_no_stop_strings() -> None:
    assert push_all(["a", "b"], []) == (["a", "b", ""], False)
    assert push_all(["a", "b"], [""]) == (["a", "b", ""], False)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """The text ends where the first match begins that the pieces so far contain."""
    out, hit = push_all(pieces, stops)
    if not hit:
        text = "".join(pieces)
        assert "".join(out) == text
        assert not any(stop in text for stop in stops)
    else:
        before, seen = "".join(pieces[: len(out) - 1]), "".join(pieces[: len(out)])
        assert not any(stop in before for stop in stops)
        assert "".join(out) == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("n_indent", "text"), [(0, "a\n  b\n c"), (1, "a\n  b\n c"), (2, "a\n  b\n "), (3, "a\n  ")]
)
def test_a_line_with_too_little_before_it(n_indent: int, text: str, size: int) -> None:
    whole, end, found = "a\n  b\n c", LineEnd(LineLimits(n_indent)), ""
    for at in range(0, len(whole), size):
        found += "" if end.is_reached else end.push(whole[at : at + size])
    assert found == text
    assert end.is_reached == (text != whole)


def test_an_empty_line_has_no_indentation() -> None:
    end = LineEnd(LineLimits(2))
    assert end.push("a\n\n  b") == "a\n"
    assert end.is_reached


def test_a_line_break_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("localkv.engine.stream.time.monotonic", lambda: now)
    end = LineEnd(LineLimits(seconds=1.0))
    assert end.push("a\n") == "a\n"
    now = 7.0
    assert end.push("b") == "b"
    assert not end.is_reached
    assert end.push("c\nd") == "c\n"
    assert end.is_reached
