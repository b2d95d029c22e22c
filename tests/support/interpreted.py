"""Triton's interpreter, without what it does again and again."""

from __future__ import annotations

from types import SimpleNamespace


def replace_language_once() -> None:
    """Let the functions of `triton.language` be the interpreter's for the rest of this process.

    By itself the interpreter replaces them at each call of each function that it runs, which takes
    about as long as what the functions do.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # NumPy from 2.4 on makes no number of an array of one axis, as Triton 3.6 asks it to
    tl.core.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
