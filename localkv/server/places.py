"""Which request has which of the places for those that run at the same time."""

from __future__ import annotations

from collections.abc import Sequence


def placed(places: Sequence[int], running: Sequence[int]) -> tuple[int, ...]:
    """The places after some requests have begun to run, or no longer do.

    A request keeps its place as long as it runs.

    Args:
        places: before, the number of a request each; 0 for none.
        running: numbers of the requests that run, at most as many as there are places.

    >>> placed((4, 7, 0), [7, 8])
    (8, 7, 0)
    """
    stay = [number if number in running else 0 for number in places]
    new = [number for number in running if number not in stay]
    for place, number in enumerate(stay):
        if not number and new:
            stay[place] = new.pop(0)
    return tuple(stay)
