"""What pictures share: names that keep apart, and are dark enough to be read."""

from __future__ import annotations

from itertools import combinations

import pytest

from localkv.commands.pictures import COLOURS, apart, ink, name_points, token_ticks


def test_labels_keep_apart() -> None:
    assert apart([5.0, 1.0, 2.0], 0.5) == [5.0, 1.0, 2.0]
    assert apart([5.0, 1.0, 1.1], 0.5) == pytest.approx([5.0, 0.8, 1.3])
    assert apart([1.0, 1.0, 1.0], 1.0) == pytest.approx([0.0, 1.0, 2.0])
    assert apart([3.0, 1.0, 1.5, 2.9], 1.0) == pytest.approx([3.6, 0.6, 1.6, 2.6])
    assert apart([], 1.0) == []


def contrast(colour: str) -> float:
    """With white, by WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear)) + 0.05)


@pytest.mark.parametrize("colour", COLOURS)
def test_names_can_be_read(colour: str) -> None:
    assert contrast(ink(colour)) >= 4.5


def test_ticks_of_tokens() -> None:
    assert token_ticks(8208)[1] == ["0", "2k", "4k", "6k", "8k"]
    assert token_ticks(131072)[1][-1] == "128k"


def test_no_name_hides_another_or_a_point() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    points = [(5 + 0.2 * (i % 5), 5 + 0.15 * (i // 5), f"a name {i}", "#000000") for i in range(20)]
    name_points(axes, points, line=[(0, 0), (10, 10)])
    boxes = [text.get_window_extent() for text in axes.texts]
    assert 3 < len(boxes) < 20
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    places = [axes.transData.transform(point[:2]) for point in points]
    assert not any(box.contains(x, y) for box in boxes for x, y in places)
