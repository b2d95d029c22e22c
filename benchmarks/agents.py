"""Let agents and client libraries hold a conversation with a server, and see whether they can.

    python benchmarks/agents.py --npm FOLDER --python PYTHON --json FILE

This does not measure how good a model is: `tests/support/scripted_server.py` is `localkv serve`
with the model that ships, and a script says what each answer is. The chat template refuses system
messages after the first message. Each agent runs as its users run it, without a terminal, with the
settings that `localkv serve --print-config` prints, and with a server and a home folder of its own.
It is asked twice, in one conversation, to read a file and to tell the number in it. The table shows
the turns whose answer had the number, the calls of tools, and tokens of prompts from the server's
log: in the first request, in all later ones together, and how many of the later ones the model had
to read. The cache had the others.

FOLDER is where these were installed (missing programs are left out):

    npm install @anthropic-ai/claude-code @openai/codex opencode-ai

PYTHON is an interpreter with the packages llm, openai, anthropic, ollama, litellm and
langchain-openai; missing packages are left out.

Agents are kept from the network by a proxy that is not there, and run without a sandbox.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.conversations import ANSWERS, CONVERSATIONS, FILES, FUNCTION, Talk  # noqa: E402
from support.scripted_server import ASK  # noqa: E402

SECONDS = 600.0
"""The longest that a turn may take."""
CONTEXT = 131_072
"""Tokens of context. The tokens of the model that ships are short: two or three make one of a large
model."""
MODEL = "tales"


def litellm_chat(url: str, model: str) -> Talk:
    """litellm's `completion`."""
    import litellm

    messages = list[Any]([{"role": "system", "content": "You work on files."}])
    tools = [{"type": "function", "function": FUNCTION}]

    def said() -> Any:
        options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
        return litellm.completion(**options, messages=messages, tools=tools).choices[0].message

    return Talk().hold(messages, said)


def langchain_chat(url: str, model: str) -> Talk:
    """langchain's `ChatOpenAI` with a bound tool."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    talk, messages = Talk(), list[Any]([SystemMessage("You work on files.")])
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none")
    bound = chat.bind_tools([{"type": "function", "function": FUNCTION}])
    for name in FILES:
        messages.append(HumanMessage(ASK.format(path=name)))
        while (message := bound.invoke(messages)).tool_calls:
            messages.append(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(talk.read(call["args"]), tool_call_id=call["id"]))
        messages.append(message)
        talk.answers.append(message.content)
    return talk


LIBRARIES: dict[str, tuple[str, Callable[..., Talk]]] = {
    "OpenAI SDK": ("openai", CONVERSATIONS["openai, chat completions"]),
    "OpenAI SDK, responses": ("openai", CONVERSATIONS["openai, responses"]),
    "Anthropic SDK": ("anthropic", CONVERSATIONS["anthropic"]),
    "ollama's client": ("ollama", CONVERSATIONS["ollama"]),
    "litellm": ("litellm", litellm_chat),
    "langchain": ("langchain-openai", langchain_chat),
}
"""The package of each, and its conversation."""


@dataclass(frozen=True)
class Place:
    """Where an agent runs.

    Attributes:
        home: its home folder, which is empty at first.
        work: the folder with the files.
        port: the server's.
    """

    home: Path
    work: Path
    port: int

    def config(self, client: str) -> str:
        """What `--print-config` prints for it."""
        words = ["serve", "--port", str(self.port), "-c", str(CONTEXT), "-a", MODEL]
        return subprocess.run(
            [sys.executable, "-m", "localkv", *words, "--print-config", client],
            capture_output=True,
            check=True,
            text=True,
        ).stdout

    def put(self, name: str, text: str) -> None:
        """Write a file of the home folder."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, words: Sequence[str], **variables: str) -> str:
        """What a program prints.

        Raises:
            RuntimeError: it fails, with the last line that it says.
        """
        nowhere = "http://127.0.0.1:9"
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TERM": "dumb",
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
            **variables,
        }
        try:
            done = subprocess.run(
                list(words),
                cwd=self.work,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done in {SECONDS:g} s") from None
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
        return done.stdout


def claude(place: Place, program: str, asks: Sequence[str]) -> list[str]:
    """Claude Code: what it says in each turn."""
    lines = [line.removeprefix("export ") for line in place.config("claude").splitlines()]
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    once = [program, "--allowedTools", "Read", "-p"]
    first = place.run([*once, asks[0]], **variables)
    return [first, *(place.run([*once, "--continue", ask], **variables) for ask in asks[1:])]


def codex(place: Place, program: str, asks: Sequence[str]) -> list[str]:
    """Codex."""
    place.put(".codex/config.toml", place.config("codex"))
    options = ["--strict-config", "--skip-git-repo-check"]
    options.append("--dangerously-bypass-approvals-and-sandbox")
    first = place.run([program, "exec", *options, asks[0]])
    again = [program, "exec", "resume", "--last", *options]
    return [first, *(place.run([*again, ask]) for ask in asks[1:])]


def opencode(place: Place, program: str, asks: Sequence[str]) -> list[str]:
    """opencode."""
    place.put(".config/opencode/opencode.jsonc", place.config("opencode"))
    variables = {
        f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "MODELS_FETCH", "SHARE")
    }
    first = place.run([program, "run", asks[0]], **variables)
    again = [program, "run", "--continue"]
    return [first, *(place.run([*again, ask], **variables) for ask in asks[1:])]


def llm(place: Place, program: str, asks: Sequence[str]) -> list[str]:
    """llm."""
    place.put(".config/io.datasette.llm/extra-openai-models.yaml", place.config("llm"))
    place.put("tool.py", "def read_file(path: str):\n    return open(path).read()\n")
    once = [program, "--functions", str(place.home / "tool.py")]
    first = place.run([*once, "-m", "localkv", asks[0]])
    return [first, *(place.run([*once, "-c", ask]) for ask in asks[1:])]


AGENTS: dict[str, tuple[str, Callable[[Place, str, Sequence[str]], list[str]]]] = {
    "Claude Code": ("claude", claude),
    "Codex": ("codex", codex),
    "opencode": ("opencode", opencode),
    "llm": ("llm", llm),
}
"""The program of each, and how it is run."""


@dataclass
class Row:
    """What came of one client's conversation.

    Attributes:
        turns: how many had the number in their answer.
        calls: how many calls of tools the model made.
        first: tokens of the first prompt that shows tools.
        later: tokens of all later prompts together.
        read: how many of the later tokens the model had to read.
        problem: what went wrong.
    """

    client: str
    version: str
    turns: int = 0
    calls: int = 0
    first: int = 0
    later: int = 0
    read: int = 0
    problem: str = ""


def rated(row: Row, answers: Sequence[str]) -> None:
    """Count the turns whose answers have the number."""
    for answer, right in zip(answers, ANSWERS, strict=True):
        number = re.search(r"\d+", right)
        assert number is not None
        if number[0] in answer:
            row.turns += 1
        else:
            row.problem = row.problem or f"said {answer.strip()[-80:]!r}"


def count(row: Row, requests: Sequence[dict[str, Any]], said: Sequence[str]) -> None:
    """Note what the server's log and the script's say of one conversation."""
    row.calls = sum(text.startswith("<tool_call>") for text in said)
    prompts = [one for one in requests if one.get("prompt_tokens")]
    most = max((one["prompt_tokens"] for one in prompts), default=0)
    # titles and the like have short prompts of their own
    of_turns = [one for one in prompts if one["prompt_tokens"] > most / 2]
    if of_turns:
        row.first = of_turns[0]["prompt_tokens"]
        row.later = sum(one["prompt_tokens"] for one in of_turns[1:])
        row.read = row.later - sum(one["cached_tokens"] for one in of_turns[1:])
    failed = sum(one["status"] >= 400 and one["method"] == "POST" for one in requests)
    if failed and not row.problem:
        row.problem = f"{failed} requests failed"


def table(rows: Sequence[Row]) -> str:
    """What is printed."""
    names = ("", "Version", "Turns right", "Calls", "First prompt", "Later prompts", "Read of them")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        cells = (row.client, row.version, f"{row.turns} of {len(ANSWERS)}", row.calls)
        figures = (f"{row.first:,}", f"{row.later:,}", f"{row.read:,}")
        lines.append(f"| {' | '.join(map(str, [*cells, *figures]))} |")
    lines += [f"\n{row.client}: {row.problem}" for row in rows if row.problem]
    return "\n".join(lines)


def _lines(path: Path) -> list[Any]:
    """Values of the JSON lines of a file, if it is there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _version(words: Sequence[str]) -> str:
    """The version that a program prints; empty if it is not there."""
    try:
        done = subprocess.run(list(words), capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    found = re.search(r"\d+(\.\w+)+", done.stdout)
    return found[0] if found and not done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--npm", type=Path, help="the folder that npm has installed agents into")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    clients = [*AGENTS, *LIBRARIES]
    parser.add_argument("--only", nargs="+", default=clients, choices=clients, metavar="CLIENT")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--talk", nargs=2, metavar=("LIBRARY", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.talk:  # in the interpreter that has the library
        talk = LIBRARIES[args.talk[0]][1](args.talk[1], MODEL)
        print(json.dumps(asdict(talk)))
        return 0

    rows = list[Row]()
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:  # Codex runs in none below /tmp
        for client in args.only:
            folder = Path(name) / re.sub(r"\W+", "-", client)
            folder.mkdir()
            found = _found(client, args.npm, args.python)
            if found is None:
                print(f"{client} is not there", file=sys.stderr)
                continue
            rows.append(_asked(client, *found, args.python, folder))
            print(f"{client}: {rows[-1].turns} turns", file=sys.stderr)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if rows and all(row.turns == len(ANSWERS) for row in rows) else 1


def _found(client: str, npm: Path | None, python: Path) -> tuple[str, str] | None:
    """The program and the version of a client; None if it is not there."""
    if client in LIBRARIES:
        package, _ = LIBRARIES[client]
        find = f"from importlib.metadata import version; print(version({package!r}))"
        version = _version([str(python), "-c", find])
        return (str(python), version) if version else None
    name, _ = AGENTS[client]
    folders = [python.parent] if npm is None else [npm / "node_modules" / ".bin", python.parent]
    for program in (str(folder / name) for folder in folders):
        if version := _version([program, "--version"]):
            return program, version
    return None


def _asked(client: str, program: str, version: str, python: Path, folder: Path) -> Row:
    """Let a client hold its conversation with a new server."""
    from support.server import RunningServer

    log, script = folder / "log.jsonl", folder / "script.jsonl"
    server = RunningServer(
        *("-a", MODEL, "-c", str(CONTEXT), "--cache-tokens", str(CONTEXT), "-t", "2"),
        *("--log-file", str(log), "--chat-template-file", str(TESTS / "data" / "strict.jinja")),
        program=(str(TESTS / "support" / "scripted_server.py"),),
        env={"SCRIPTED_LOG": str(script)},
    ).wait()
    place = Place(folder / "home", folder / "work", int(server.url.rpartition(":")[2]))
    for path in (place.home, place.work):
        path.mkdir()
    for name, text in FILES.items():
        (place.work / name).write_text(text + "\n")
    row = Row(client, version)
    try:
        if client in AGENTS:
            asks = [ASK.format(path=place.work / name) for name in FILES]
            answers = AGENTS[client][1](place, program, asks)
        else:
            said = place.run([str(python), __file__, "--talk", client, server.url])
            answers = json.loads(said.splitlines()[-1])["answers"]
        rated(row, answers)
    except RuntimeError as error:
        row.problem = str(error)
    finally:
        server.stop()
    count(row, _lines(log), _lines(script))
    return row


if __name__ == "__main__":
    sys.exit(main())
