"""How the panels of weights lie in memory, by format: what their `cpu.py` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from localkv.kernels.cpu.linear.panel_bytes import PANEL_FORMAT_NAMES
from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.cpu.panel_layout import PanelLayout


class _Layouts(Mapping[str, PanelLayout]):
    """Those of all formats; the files of a format are imported for who asks for it."""

    def __init__(self) -> None:
        self._known = dict[str, PanelLayout]()

    def __getitem__(self, name: str) -> PanelLayout:
        if name not in self._known:
            if name not in self:
                raise KeyError(name)
            self._known[name] = FORMATS[name].cpu_layout.LAYOUT
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in PANEL_FORMAT_NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(PANEL_FORMAT_NAMES)

    def __len__(self) -> int:
        return len(PANEL_FORMAT_NAMES)


LAYOUTS: Mapping[str, PanelLayout] = _Layouts()
