"""The file that `--plot` names."""

from __future__ import annotations

import importlib.util
import io
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from localkv.cli.output.text_output import check_writable
from localkv.errors import UsageError
from localkv.system.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Find out before anything is measured that no picture could be made.

    Raises:
        UsageError: matplotlib is missing, or the file can't be written.
    """
    if Path(path).suffix.lower() not in KINDS:
        raise UsageError(
            f"--plot {path}: not a kind of picture", hint=f"end it in {', '.join(KINDS)}"
        )
    check_writable(Path(path))
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint="pip install 'localkv[plot]'")


def save(figure: Figure, path: str) -> None:
    """Write a figure: the same figure, the same bytes."""
    from matplotlib import rc_context

    dates = {".svg": "Date", ".pdf": "CreationDate"}
    kind, picture = Path(path).suffix.lower(), io.BytesIO()
    with rc_context({"svg.hashsalt": "localkv"}):
        metadata = {dates[kind]: None} if kind in dates else None
        figure.savefig(picture, format=kind[1:], dpi=150, metadata=metadata)
    write_whole(path, _opaque(picture) if kind == ".png" else picture.getvalue())


def _opaque(png: io.BytesIO) -> bytes:
    """The same picture without transparency, of which it has none: fewer bytes."""
    from PIL import Image

    smaller = io.BytesIO()
    options = {"compress_level": 9, "compress_type": zlib.Z_DEFAULT_STRATEGY, "dpi": (150, 150)}
    Image.open(png).convert("RGB").save(smaller, "PNG", **options)
    return smaller.getvalue()
