"""A generated token's way from the API to the compiled kernels is short."""

from __future__ import annotations

import sys
from array import array
from types import CodeType

import pytest

from localkv import LLM
from localkv.kernels.cpu.runtime import chain
from localkv.llm import TextModel
from support.paths import MODELS

MOST_FRAMES = 17
"""Python's frames of a token, from `LLM.complete` to the chain of compiled steps."""


def test_a_token_takes_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function is entered twice on the way."""
    ways, run_steps = list[list[CodeType]](), chain.run_steps

    def noted(steps: array[int], n_threads: int) -> None:
        frame, way = sys._getframe(1), list[CodeType]()
        while frame.f_code is not TextModel.complete.__code__:
            way.append(frame.f_code)
            assert frame.f_back is not None
            frame = frame.f_back
        ways.append([*way, frame.f_code])
        run_steps(steps, n_threads)

    with LLM(MODELS / "tales-4M-Q8_0.gguf", n_ctx=256, device="cpu", n_threads=1) as llm:
        monkeypatch.setattr(chain, "run_steps", noted)
        llm.complete("Once upon a time", max_tokens=24, temperature=0.8, seed=1)
    for way in ways[-8:]:
        names = [code.co_name for code in way]
        assert len(way) <= MOST_FRAMES, names
        assert len(set(way)) == len(way), names
