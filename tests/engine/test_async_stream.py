"""Streams of text in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from localkv import LLM
from localkv.errors import ContextOverflowError
from support.tiny_model import write_tiny_model

PROMPTS = ["Once upon a time", "The fox", "The fox and the owl"]
OPTIONS = {"max_tokens": 30, "seed": 5}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny_model(tmp_path_factory.mktemp("async") / "tiny.gguf")
    with LLM(path, n_ctx=200, n_parallel=3) as llm:
        yield llm


def test_tasks_share_steps(llm: LLM) -> None:
    """Each gets the text that it would get alone, and the event loop is never held up."""
    want = [llm.complete(prompt, **OPTIONS).text for prompt in PROMPTS]
    before, ticks = llm.batch.stats.n_steps, 0

    async def read(prompt: str) -> str:
        async with llm.astream(prompt, **OPTIONS) as stream:
            return "".join([piece async for piece in stream])

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def main() -> list[str]:
        ticking = asyncio.create_task(tick())
        texts = await asyncio.gather(*map(read, PROMPTS))
        ticking.cancel()
        return texts

    assert asyncio.run(main()) == want
    assert llm.batch.stats.n_steps - before < 3 * 30
    assert ticks > 10


def test_the_completion(llm: LLM) -> None:
    async def main() -> list[str]:
        """At once, after all pieces, and after some of them."""
        stream, few = (llm.astream(PROMPTS[0], **OPTIONS) for _ in range(2))
        pieces = [piece async for piece in stream]
        assert [piece async for piece in stream] == []
        first = await anext(few)
        await few.aclose()
        assert [piece async for piece in few] == []
        broken_off = await few.completion()
        assert (broken_off.text, broken_off.finish_reason) == (first, "cancelled")
        texts = [await llm.astream(PROMPTS[0], **OPTIONS).completion(), await stream.completion()]
        return ["".join(pieces), *(one.text for one in texts)]

    assert asyncio.run(main()) == [llm.complete(PROMPTS[0], **OPTIONS).text] * 3


def test_a_cancelled_task_ends_its_generation(llm: LLM) -> None:
    async def main() -> str | None:
        stream = llm.astream(PROMPTS[0], ignore_eos=True)
        task = asyncio.create_task(stream.completion())
        while not stream.stream.stats.n_generated:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        return stream.stream.completion.finish_reason

    assert asyncio.run(main()) == "cancelled"
    assert llm.batch.is_idle


def test_errors_come_at_once(llm: LLM) -> None:
    with pytest.raises(ContextOverflowError):
        llm.astream([1] * 300)
