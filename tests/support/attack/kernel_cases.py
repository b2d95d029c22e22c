"""Random calls of the CPU's kernels on guarded memory, compared with the reference.

It runs as a program, so that a fault ends a process of its own. Each argument is KIND:SEED:AMOUNT:
how many cases of a kind or, with an "s" behind it, how many seconds. Each case is told before it
runs.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from support.attack.activation_cases import activation_case
from support.attack.attention_cases import attention_case, store_case
from support.attack.expert_cases import expert_case
from support.attack.product_cases import adapter_case, linear_case, product_case
from support.attack.random_calls import Memory, close
from support.attack.recurrent_cases import recurrent_case
from support.attack.token_cases import latent_case, token_case
from support.guarded_memory import GuardedMemory, guarded
from support.torch_edge import torch_of

WRONG = ("read", "write", "scratch", "leave")
"""What kernels do that must be found."""


def wrong_case(
    kind: str, rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]
) -> None:
    """A norm that is told of more than there is, or of memory that nobody wrote."""
    n = rng.choice((16, 100, 1024))
    say(f"{n} values")
    more = {name: n + 16 * (name == kind) for name in ("read", "write", "scratch")}
    told = max(more.values())
    x = memory.tensor(torch.ones(n if kind == "read" else told), "x")
    weight = memory.tensor(torch.ones(told), "a norm")
    out = torch_of(memory.empty((n if kind == "write" else told,), "out"))
    chain = Chain(Scratch())
    part = chain.take(4 * n)
    goal = Memory(part if kind == "scratch" else out, 4 * n)
    if kind == "leave":
        x.fill_(math.nan)  # as what was not written
    eps = Memory(memory.tensor(torch.ones(1), "eps"), 4)
    job = [0, 1, told, Memory(x, 4 * n), Memory(weight, 4 * n), eps, goal, 0]
    chain.add(specialized(KernelSource("linear/activations"))["norm"], job, 1)
    chain.run()
    close(out[:n], torch.ones(n) / math.sqrt(2))


KINDS: dict[str, Callable[[random.Random, GuardedMemory, Callable[[str], None]], None]] = {
    "attention": attention_case,
    "store": store_case,
    "products": product_case,
    "linear": linear_case,
    "adapters": adapter_case,
    "activations": activation_case,
    "recurrent": recurrent_case,
    "experts": expert_case,
    "token": token_case,
    "latent": latent_case,
    **{f"wrong {kind}": partial(wrong_case, kind) for kind in WRONG},
}


def run(kind: str, seed: int, amount: str) -> None:
    end = time.monotonic() + float(amount[:-1]) if amount.endswith("s") else math.inf
    most = sys.maxsize if amount.endswith("s") else int(amount)
    n_cases = n_blocks = 0
    for number in itertools.count(seed):
        if n_cases == most or time.monotonic() >= end:
            break
        name = f"{kind} {number}"
        rng = random.Random(name)
        torch.manual_seed(number)
        with guarded(rng) as memory:
            KINDS[kind](rng, memory, partial(print, name, flush=True))
        n_cases += 1
        n_blocks += memory.n_guarded
    print(f"done: {n_cases} cases of {kind}, {n_blocks} blocks", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    for argument in sys.argv[1:]:
        kind, seed, amount = argument.split(":")
        run(kind, int(seed), amount)
