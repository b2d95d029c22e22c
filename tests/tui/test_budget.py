"""A chat whose cache has a budget, with the shipped model: down the ladder to the full context."""

from __future__ import annotations

import re

import pytest

from localkv.chat.engine import EngineOptions
from localkv.engine_process.conversation import LocalEngine
from localkv.sampling.params import SamplingParams
from localkv.tui.chat_audit import AuditScreen
from localkv.tui.full_context import FullContextScreen
from support.chat_pilot import User, user
from support.paths import MODELS

N_CTX = 2048
THIRD = N_CTX * 2560 // 3
"""A third of the bytes of an f16 cache of the shipped model."""
FACTS = (
    "The code of the owl is 735. Mia likes honey. The lamp is in room 42. Anna lives by the "
    "harbour. In the red box is the key. The age of Tom is 61."
)


def rungs(me: User) -> list[int]:
    """The pages of each pair of types, as the meter shows them."""
    lines = [line.split() for line in me.rendered("#meter").splitlines()]
    found = {words[0]: int(words[1]) for words in lines if words[2:3] in (["page"], ["pages"])}
    return [found[pair] for pair in me.chat.meter.facts.kv_ladder]


async def ask(me: User, text: str, *, seed: int, **drawing: float) -> None:
    """Ask, with a seed of its own for the answer."""
    me.chat.session.params = SamplingParams(seed=seed, **drawing)
    await me.ask(text)


@pytest.mark.slow
async def test_a_chat_goes_down_the_ladder_to_the_full_context() -> None:
    ladder = "f16,q8_0,q8_0/q4_0,q4_0/kv3_0"  # its audit has flips
    cache = {"kv_budget": THIRD, "kv_ladder": ladder}
    engine = LocalEngine(
        EngineOptions(str(MODELS / "tales-4M-F16.gguf"), {"device": "cpu", **cache})
    )
    async with user(engine, params=SamplingParams(), max_tokens=300) as me:
        seeds = iter(range(1, 30))  # how long a story gets differs from CPU to CPU
        await ask(me, f"{FACTS} Tell me a story.", seed=next(seeds))
        shown = [rungs(me)]
        while shown[-1][-1] < 2:
            await ask(me, "Tell me a story.", seed=next(seeds))
            shown.append(rungs(me))
        depths = [sum(rung * n for rung, n in enumerate(counts)) for counts in shown]
        assert depths[0] == 0
        assert depths == sorted(set(depths))
        assert shown[-1][0] < shown[0][0]

        await ask(me, "What is the code of the owl?", seed=1, temperature=0)
        assert "735" in me.texts[-1]

        while not isinstance(me.app.screen, FullContextScreen):
            await ask(me, "Tell me a story.", seed=next(seeds))
            await me.pilot.pause()
        await me.until(lambda: isinstance(me.app.screen, FullContextScreen))
        assert me.chat.meter.n_tokens == N_CTX
        await me.press("escape")
        assert rungs(me)[-1] > shown[-1][-1]

        await me.send("/audit")
        await me.until(lambda: isinstance(me.app.screen, AuditScreen))
        assert "with another most likely choice than f16's" in me.rendered("#audit-line")
        assert re.match(r"token \d+: '.+' 0\.\d\d -> '.+' 0\.\d\d", me.rendered("#audit-flips"))
        await me.press("escape")
        assert me.notes == ""
