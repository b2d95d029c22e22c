"""The hybrid model that ships, and the network that it was trained as."""

from __future__ import annotations

import sys

import pytest
import torch

from localkv import LLM
from localkv.kernels.backend import Guessing
from support.paths import MODELS

sys.path.insert(0, str(MODELS))

from hybrid import HybridShape, gated_delta, new_network
from optimizer import Optimizer

MODEL = MODELS / "tales-hybrid-Q8_0.gguf"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_head_guesses_most_of_a_story(temperature: float) -> None:
    """Stories are the same by bytes, however many tokens it guesses at a time."""
    assert MODEL.stat().st_size <= 2 << 20
    llm = LLM(MODEL, n_ctx=512)
    prompt = llm.chat_prompt(
        [{"role": "user", "content": "Tell me a story about a fox named Tom."}]
    )
    head = llm.engine.head
    assert head is not None
    pace = head.pace
    pace.may_draft = lambda *_: True  # whatever the machine is busy with
    pace.worthy = lambda found, *_: [len(guesses) for guesses in found]
    asked = {"max_tokens": 150, "temperature": temperature, "seed": 5}
    text = llm.complete(prompt, spec="none", **asked).text
    for n, least in ((1, 0.75), (3, 0.5)):
        guessing = Guessing(n, 1024, 0.0, (), (1.0,), (0.0,) * n)
        pace.guessing = lambda *_, guessing=guessing, **__: guessing
        llm.engine.reset()
        done = llm.complete(prompt, spec="mtp", **asked)
        assert done.text == text
        usage = done.usage
        assert usage.accepted_tokens > least * usage.drafted_tokens > 20


def test_chunks_of_the_delta_rule_are_token_after_token() -> None:
    torch.manual_seed(0)
    rows, length, heads, size = 2, 70, 2, 16
    q, k, v = torch.randn(3, rows, length, heads, size)
    k = torch.nn.functional.normalize(k, dim=-1)
    fading, beta = -torch.rand(rows, length, heads), torch.rand(rows, length, heads)
    state, wanted = torch.zeros(rows, heads, size, size), []
    for t in range(length):
        state = state * fading[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("rhij,rhi->rhj", state, k[:, t])
        state = state + torch.einsum("rhi,rhj->rhij", k[:, t], error * beta[:, t, :, None])
        wanted.append(torch.einsum("rhij,rhi->rhj", state, q[:, t]))
    got = gated_delta(q, k, v, fading, beta)
    torch.testing.assert_close(got, torch.stack(wanted, 1), rtol=1e-4, atol=1e-4)


def test_a_token_changes_none_before_it_and_all_tensors_learn() -> None:
    """What the network says of a token, and what its head guesses, depend on earlier ones alone."""
    torch.manual_seed(0)
    network = new_network(HybridShape(vocabulary=64, width=32, layers=4, hidden=32, head_width=16))
    ids = torch.randint(64, (1, 40))
    other = torch.cat((ids[:, :30], (ids[:, 30:] + 1) % 64), 1)
    for _ in range(3):
        hidden = network.hidden(ids)
        guesses = network.guesses(hidden, ids, 2)
        loss = network.logits(hidden).square().mean() + sum(one.square().mean() for one in guesses)
        loss.backward()
        Optimizer(network, 0.01, 0.01).step(1.0)
        found = {name for name, one in network.named_parameters() if one.grad is None}
        network.zero_grad()
    assert not found
    with torch.no_grad():
        first, second = (network.hidden(some) for some in (ids, other))
        torch.testing.assert_close(first[:, :30], second[:, :30])
        pairs = zip(network.guesses(first, ids, 2), network.guesses(second, other, 2), strict=True)
        for n, (one, two) in enumerate(pairs, 1):
            torch.testing.assert_close(one[:, : 30 - n], two[:, : 30 - n])
