"""`localkv serve` beside llama-server: `python benchmarks/serve.py --peer FILE --json FILE`.

A model with random weights (Q4_0, 1.1 billion unless --shape says another), K and V in q8_0,
contexts of 4,096 tokens in a cache of eight of them. llama-server has its own defaults for all
else, but for flash attention, without which it has no q8_0 V, and its page, which is left out;
--peer-options gives it others. Both servers are loaded, and asked in turn; one that nobody asks
waits without work.

- streams: 1, 2, 4, 8 and 16 ("4 streams" are those alone): tokens per second of all, from the first
  request to the last token and while all are written, times to first tokens and between tokens;
- long: a long prompt alone, and while four streams are written;
- short: a short prompt behind a long one;
- prefixes: the next turn of a conversation, and 16 requests with one beginning;
- liveness: /health and /metrics while a long prompt is read;
- gone: requests that go away;
- crowd: 256 streams beside 500 idle connections.

A part that a server has not done after --limit seconds is broken off, and says so; what it has
found by then counts. With --json, figures are added to those that the file has of earlier runs
with the same settings, so that all can be measured in pieces. The tables have medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from random_model import shape_of, write_model
from serve_client import Client
from serve_parts import PARTS, Asked, Figures, Part, Prompts
from serve_report import plot, table

from localkv.system.processor import processor_name

PARALLEL = 16
IDLE_SECONDS = 20.0
"""How long a server may take to be idle again after a part that was broken off."""
SERVERS = ("localkv", "llama-server")


class Server:
    """A server's process.

    Args:
        command: what to run, without the port.
        port: given to it; 0 if it says which it took.
    """

    def __init__(self, command: Sequence[str], port: int = 0) -> None:
        self._command, self._port = command, port
        self.start()

    def start(self) -> None:
        """Run it."""
        self.began, port = time.perf_counter(), self._port
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*self._command, "--port", str(port)], stdout=self.log, stderr=subprocess.STDOUT
        )
        while not port:
            self.log.seek(0)
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log.read()):
                port = int(found[1])
            self._check()
        self.client = Client(port)

    def _check(self) -> None:
        if self.process.poll() is not None:
            self.log.seek(0)
            sys.exit(f"a server ended:\n{self.log.read()[-2000:]}")
        time.sleep(0.005)

    async def ready(self) -> Figures:
        """Seconds from the start to the first answer, and to a loaded model."""
        answers = 0.0
        while True:
            self._check()
            try:
                status, _ = await self.client.get("/health")
            except OSError:
                continue
            answers = answers or time.perf_counter() - self.began
            if status == 200:
                return {"answers_s": answers, "loaded_s": time.perf_counter() - self.began}

    def memory_mib(self) -> float:
        """What the process itself takes, without its children and the files that it maps."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+)", status)
        return int(found[1]) / 1024 if found else 0.0

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Measured:
    """Figures by what was measured and by server, of each round.

    Args:
        settings: that they belong to.
        path: the file in which they are kept, if there is one.

    Raises:
        SystemExit: its figures are of other settings.
    """

    def __init__(self, settings: dict[str, Any], path: Path | None) -> None:
        self.settings, self._path = settings, path
        self.rounds = dict[str, dict[str, list[Figures]]]()
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            for name, value in settings.items():
                if value != known.get(name) and not (value is None or known.get(name) is None):
                    sys.exit(
                        f"{path} is of {name} {known.get(name)}, not {value}: name another file"
                    )
            self.rounds = known["rounds"]
            self.settings = {name: known[name] or value for name, value in settings.items()}

    @property
    def all(self) -> dict[str, Any]:
        """What the file has."""
        return {**self.settings, "rounds": self.rounds}

    def add(self, what: str, server: str, figures: Figures) -> None:
        """Keep the figures of one round, and write the file."""
        self.rounds.setdefault(what, {}).setdefault(server, []).append(figures)
        told = {name: round(value, 2) for name, value in figures.items()}
        print(what, server, told, file=sys.stderr, flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.all, indent=1) + "\n")


async def limited(part: Part, asked: Asked, server: Server, seconds: float) -> Figures:
    """What a part finds; with `limit_s` if it was broken off."""
    found = Figures()
    try:
        async with asyncio.timeout(seconds):
            await part(asked, found)
    except TimeoutError:
        found["limit_s"] = seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await server.client.complete(asked.prompts.new(8), 1)
                return found
        server.stop()  # it has not noticed that nobody waits
        server.start()
        await server.ready()
        asked.client = server.client
    return found


async def measure(
    servers: dict[str, Server], n_vocab: int, measured: Measured, options: argparse.Namespace
) -> None:
    """The parts that are asked for, the servers in turn."""
    # other tokens in each run, none of which a server knows from the run before
    prompts = Prompts(n_vocab, seed=time.time_ns())
    n_long = min(options.context - 64, 3900)
    for name, server in servers.items():
        measured.add("start", name, await server.ready())
    asked = {
        name: Asked(server.client, prompts, n_long, server.memory_mib)
        for name, server in servers.items()
    }
    for server in servers.values():
        await server.client.complete(prompts.new(64), 8)
    parts = [item for name in options.parts for item in PARTS[name]]
    for number in range(options.rounds):
        for what, part in parts:
            for name in list(servers)[:: -1 if number % 2 else 1]:
                figures = await limited(part, asked[name], servers[name], options.limit)
                measured.add(what, name, figures)


def commands(model: Path, options: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """How the servers are started, and their ports."""
    pool = str(PARALLEL * options.context // 2)
    each = ["-m", str(model), "-ctk", "q8_0", "-ctv", "q8_0"]
    ours = [sys.executable, "-m", "localkv", "serve", *each, "-c", str(options.context)]
    found = {"localkv": ([*ours, "-np", str(PARALLEL), "--cache-tokens", pool], 0)}
    if options.peer:
        peer = [options.peer, *each, "-c", pool, "-fa", "on", "--no-webui"]
        found["llama-server"] = [*peer, *shlex.split(options.peer_options)], options.peer_port
    return {name: command for name, command in found.items() if name in options.servers}


def _names(known: Sequence[str]) -> Any:
    """A type of options: names of a list, with commas between."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if wrong := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"no {wrong[0]!r}: there are {', '.join(known)}")
        return found

    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", help="llama-server; without it localkv alone is measured")
    parser.add_argument("--peer-port", type=int, default=8123)
    parser.add_argument("--peer-options", default="", help="for llama-server, such as '-np 16'")
    parser.add_argument("--servers", type=_names(SERVERS), default=list(SERVERS))
    every = [name for name in PARTS if not name.endswith(" streams")]
    parser.add_argument("--parts", type=_names(list(PARTS)), default=every)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds, of each part (120)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="llama-1.1b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--model", type=Path, help="where the model is, or is to be kept")
    parser.add_argument("--json", type=Path, help="add the figures to those of a file")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    shape = shape_of(options.shape)
    measured = Measured(
        {
            "machine": processor_name(),
            "shape": options.shape,
            "context": options.context,
            "peer_options": options.peer_options if options.peer else None,
        },
        options.json,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model.gguf"
        if not model.exists():
            write_model(model, shape, "q4_0", has_words=True)
        servers = dict[str, Server]()
        try:
            for name, (command, port) in commands(model, options).items():
                servers[name] = Server(command, port)
            asyncio.run(measure(servers, shape.n_vocab, measured, options))
        finally:
            for server in servers.values():
                server.stop()
    print(table(measured.all))
    if options.plot:
        plot(measured.all, options.plot)


if __name__ == "__main__":
    main()
