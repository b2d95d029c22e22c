"""Ask a server for hours, break off at random, and look whether it loses anything.

    python benchmarks/soak.py --minutes 60

In each round clients ask for texts of random lengths, many of which begin alike. The cache is too
small for all: requests wait, are preempted, and drop each other's texts. Some keep to a schema.
Some reset the connection at a random moment, or read a byte at a time. States are saved and
restored between them. After a round nothing may run, no page may be missing,
and each of its texts must have the same bytes when it is asked for alone (as many of them as there
is time for: as long as the round was, three times).

The processes' memory may have grown by 2 % at the end of the rounds since the end of the first
fifth. In the last sixth of the time the engine is killed again and again at random moments while
clients ask. Each time another one must serve, and nothing else may fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from soak_client import Client, Findings, repeat_alone, run_clients

MODEL = Path(__file__).parents[1] / "models" / "tales-4M-Q8_0.gguf"
OPTIONS = ("-np", "8", "--cache-tokens", "2560", "--queue", "32")
"""Options of the server: its cache is too small for what is asked."""
MOST_GROWTH = 0.02
START_SECONDS = 300.0
"""How long the model may take to load; kernels may have to be compiled."""
IDLE_SECONDS = 60.0
"""How long it may take until nothing runs, once nobody asks."""
KILL_SECONDS = 33.0
"""Between two deaths of the engine: with three in a minute the server would end."""


class Server:
    """A server's process.

    Args:
        folder: for states, and for what it says.
        options: of `localkv serve`, beside the model and the port.
    """

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "localkv", "serve", "-m", str(MODEL), "--port", "0"]
        command += ["--state-dir", str(folder), *options]
        self._said = folder / "said.txt"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said)
        self.port = int(self._wait_for(r"listening on http://\S+:(\d+);"))

    def _wait_for(self, pattern: str) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(pattern, self.said):
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        sys.exit(f"the server does not start:\n{self.said}")

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self._said.read_text()

    @property
    def engine_pid(self) -> int | None:
        """The process of the engine that runs now."""
        for pid in self.processes[1:]:
            if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    @property
    def processes(self) -> list[int]:
        """The server and its children."""
        pid = self.process.pid
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [pid, *(int(child) for task in tasks for child in task.read_text().split())]

    @property
    def memory(self) -> dict[int, int]:
        """Bytes that each process has in memory, files it maps left out."""
        status = {pid: Path(f"/proc/{pid}/status").read_text() for pid in self.processes}
        return {
            pid: 1024 * int(found[1])
            for pid, text in status.items()
            if (found := re.search(r"RssAnon:\s+(\d+)", text))
        }

    def stop(self) -> int:
        """End it; its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Soak:
    """Rounds of load, and a look after each.

    Args:
        server: that is asked.
        n_clients: that ask it at the same time.
        seed: of what they ask.
    """

    def __init__(self, server: Server, n_clients: int, seed: int) -> None:
        self.server, self.n_clients, self.seed = server, n_clients, seed
        self.findings = Findings()
        self.began = time.monotonic()

    def round(self, seconds: float, *, engine_may_die: bool = False) -> None:
        """Load, and then each answer again."""
        self.seed += 1
        findings = self.findings
        client = Client(self.server.port, findings, engine_may_die=engine_may_die)
        findings.answers.clear()
        run_clients(client, self.n_clients, seconds, self.seed)
        self.check_pages(client)
        answers = list(findings.answers)
        random.Random(self.seed).shuffle(answers)
        repeat_alone(client, answers, time.monotonic() + 3 * seconds)
        self.say(client)

    def check_pages(self, client: Client) -> None:
        """Nothing runs, and each page is free or of a text that is kept."""
        end = time.monotonic() + IDLE_SECONDS
        while any((cache := self.cache(client))["requests"].values()):
            if time.monotonic() > end:
                self.findings.problem(f"requests that nobody waits for: {cache['requests']}")
                return
            time.sleep(0.1)
        pages = cache["pages"]
        if pages["running"] or pages["lost"] or pages["kept"] + pages["free"] != pages["all"]:
            self.findings.problem(f"pages are missing: {pages}")

    def cache(self, client: Client) -> Any:
        """What is in the cache, once an engine is there."""
        if not self.wait_for_engine(client, START_SECONDS):
            sys.exit(f"the server is gone:\n{self.server.said}")
        return json.loads(client.get("/localkv/cache")[1])

    @staticmethod
    def wait_for_engine(client: Client, seconds: float) -> bool:
        """Until a model is loaded; whether it is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if client.get("/health")[0] == 200:
                    return True
            except OSError:
                return False
            time.sleep(0.05)
        return False

    def say(self, client: Client) -> None:
        """A line about all that was done so far."""
        metrics = client.get("/metrics")[1]
        preempted = re.search(r"^localkv_preemptions_total (\S+)", metrics, re.MULTILINE)
        counts = self.findings.counts
        memory = " + ".join(f"{size >> 20}" for size in self.server.memory.values())
        print(
            f"{time.monotonic() - self.began:.0f} s: {counts.answers} answers, "
            f"{counts.repeated} repeated alone, {counts.broken_off} broken off, "
            f"{counts.refused} refused, {counts.failed} failed, "
            f"{float(preempted[1]) if preempted else 0:.0f} preempted, {memory} MiB, "
            f"{len(self.findings.problems)} problems",
            flush=True,
        )

    def kill(self, seconds: float) -> int:
        """Kill the engine while clients ask; how often."""
        n_kills, end = 0, time.monotonic() + seconds
        client = Client(self.server.port, self.findings, engine_may_die=True)
        draw = random.Random(self.seed)
        while not n_kills or time.monotonic() + KILL_SECONDS < end:
            began = time.monotonic()
            asking = Thread(target=self.round, args=(4,), kwargs={"engine_may_die": True})
            asking.start()
            time.sleep(draw.uniform(0.5, 3.5))
            if (pid := self.server.engine_pid) is not None:
                os.kill(pid, signal.SIGKILL)
                n_kills += 1
            asking.join()
            if not self.wait_for_engine(client, START_SECONDS):
                sys.exit(f"no other engine was started:\n{self.server.said}")
            time.sleep(max(0.0, began + KILL_SECONDS - time.monotonic()))
        return n_kills


def main() -> int:
    """Run it; 1 if something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="all of it (60)")
    parser.add_argument("--clients", type=int, default=24, help="that ask at a time (24)")
    parser.add_argument("--round", type=float, default=15.0, help="seconds of load a round (15)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began, seconds = time.monotonic(), 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), OPTIONS)
        soak = Soak(server, options.clients, options.seed)
        findings = soak.findings
        try:
            if not soak.wait_for_engine(Client(server.port, findings), START_SECONDS):
                sys.exit(f"the model is not loaded after {START_SECONDS:g} s:\n{server.said}")
            before = dict[int, int]()
            while time.monotonic() - began < 5 / 6 * seconds or not before:
                soak.round(options.round)
                if not before and time.monotonic() - began > seconds / 5:
                    before = server.memory
            after = server.memory
            n_kills = soak.kill(seconds - (time.monotonic() - began))
        finally:
            code = server.stop()
        if "Traceback" in server.said:
            findings.problem(f"the server said:\n{server.said[-2000:]}")
    if before.keys() != after.keys():
        findings.problem(f"other processes than at first: {[*before]}, {[*after]}")
    growth = sum(after.values()) / sum(before.values()) - 1
    if growth > MOST_GROWTH:
        findings.problem(f"memory has grown by {growth:.1%}")
    if code:
        findings.problem(f"exit code {code}")
    n_problems = len(findings.problems)
    print(f"memory {growth:+.1%}, engine killed {n_kills} times, {n_problems} problems", flush=True)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
