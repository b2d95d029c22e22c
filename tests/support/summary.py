"""`Summary`: what the fixture of that name is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Summary = Callable[[str, Mapping[str, float]], None]
