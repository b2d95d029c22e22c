"""The model that comes with localkv, and the folders where it can be."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SHIPPED = "tales-4M-Q8_0.gguf"


def shipped_model() -> Path | None:
    """Its file; None if this copy of localkv has none."""
    files = (folder / SHIPPED for folder in own_shelves())
    return next((file for file in files if file.is_file()), None)


def own_shelves() -> list[Path]:
    """Folders of models: an installed package has one inside, a checkout has one beside it."""
    own = [PACKAGE / "models"]
    if (PACKAGE.parent / "pyproject.toml").exists():  # beside an installed one are other packages
        own.append(PACKAGE.parent / "models")
    return own
