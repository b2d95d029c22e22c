"""The decode rate inside the chat, beside that of the engine alone: what the screen costs.

    python benchmarks/chat.py [-m models/tales-4M-F16.gguf] [--rounds 9] [--json FILE]

Both run the same conversation with the same types and threads, and take turns. The engine alone
is in a process of its own that draws nothing. The chat has no terminal, but draws everything. One
round warms up and is not counted. Prints a table; `--json` writes every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from localkv.chat.engine import ChatRequest, EngineOptions, Finished
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.commands.chat import default_threads
from localkv.engine_process.client import EngineProcess
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from localkv.tui.widgets.prompt import PromptSubmitted

QUESTION = "Tell me a story about a fox named Mia."


def alone(engine: EngineProcess, request: ChatRequest) -> Finished:
    """One answer, to nobody."""
    *_, finished = engine.answer(request)
    assert isinstance(finished, Finished)
    return finished


async def in_chat(app: ChatApp) -> Finished:
    """One answer in a new session of the running chat."""
    screen = app.chat
    await screen.new_chat()
    before = screen.meter.last
    screen.post_message(PromptSubmitted(QUESTION))
    while screen.meter.last is before or screen.busy:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # the rest of the drawing
    assert screen.meter.last is not None
    return screen.meter.last


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each round, by way."""
    arguments = {
        "n_ctx": args.ctx_size,
        "cache_type_k": args.cache_type_k,
        "cache_type_v": args.cache_type_v,
        "n_threads": args.threads,
    }
    options = EngineOptions(args.model, arguments)
    params = SamplingParams(seed=1, temperature=0.0)
    request = ChatRequest(
        [{"role": "user", "content": QUESTION}], params, args.n_predict, ignore_eos=True
    )
    engine = EngineProcess(options)
    engine.load(lambda progress: None)
    session = ChatSession(
        Store(":memory:"),
        model=args.model,
        params=params,
        max_tokens=args.n_predict,
        ignore_eos=True,
    )
    app = ChatApp(ChatScreen(session, options, EngineProcess))
    rates: dict[str, list[float]] = {"engine": [], "chat": []}
    async with app.run_test(size=(120, 40)):
        while app.chat.meter.facts is None:
            await asyncio.sleep(0.05)
        for n_round in range(args.rounds + 1):
            for way in rates:
                time.sleep(0.2)  # what the round before has left to do
                if way == "engine":
                    finished = await asyncio.to_thread(alone, engine, request)
                else:
                    finished = await in_chat(app)
                assert finished.completion_tokens == args.n_predict
                if n_round:
                    rates[way].append(finished.decode_per_second)
    engine.close()
    return rates


def _summary(values: list[float]) -> tuple[float, float, float]:
    return max(values), statistics.median(values), min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="models/tales-4M-F16.gguf")
    parser.add_argument("-ctk", "--cache-type-k", default="q4_0")
    parser.add_argument("-ctv", "--cache-type-v", default="q8_0")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-n", "--n-predict", type=int, default=400)
    parser.add_argument("-t", "--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    rates = asyncio.run(measure(args))
    ratios = [chat / engine for chat, engine in zip(rates["chat"], rates["engine"], strict=True)]
    ratio = statistics.median(ratios)
    # whatever else the machine does only takes speed away, so the best rounds tell most
    best = max(rates["chat"]) / max(rates["engine"])
    print(f"{'tokens/s':<10}{'best':>8}{'median':>8}{'min':>8}")
    for way, values in (*rates.items(), ("ratio", ratios)):
        summary = (best, ratio, min(ratios)) if way == "ratio" else _summary(values)
        print(
            f"{way:<10}" + "".join(f"{value:8.{2 if way == 'ratio' else 1}f}" for value in summary)
        )
    if args.json:
        facts = {"threads": args.threads, "model": args.model}
        args.json.write_text(json.dumps({**facts, **rates, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
