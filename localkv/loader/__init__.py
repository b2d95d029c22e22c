"""From files to models, tokenizers and templates. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.tokenizer import load_tokenizer
    from localkv.loader.weights import load_model

__all__ = ["load_model", "load_tokenizer", "open_gguf"]

_HOMES = {
    "load_model": "localkv.loader.weights",
    "load_tokenizer": "localkv.loader.tokenizer",
    "open_gguf": "localkv.loader.gguf_file",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
