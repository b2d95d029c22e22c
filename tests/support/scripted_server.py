"""`localkv` with a model whose answers a script gives: only the choice of words is not real.

`python scripted_server.py serve ...` takes the arguments of `localkv serve`. The model is loaded
and evaluates every token. The template, the tokenizer, the cache and the readers of calls are what
users have. Only the text of each answer is fixed beforehand, by a grammar with one text in it. The
script knows one conversation. Asked to read a file, it calls the tool that the prompt shows for
this, and once it has the result, it says the number in it. All that it says is also added to the
file that SCRIPTED_LOG names, if it names one, a JSON string a line.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ASK = "Read the file {path} and tell me the number in it."
"""What the script understands."""

_ASK = re.compile(r"Read the file (\S+) and tell me the number in it")
_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_NUMBER = re.compile(r"the number is (\d+)")
_RESULT = "<tool_response>"

ARGUMENTS: dict[str, Callable[[str], dict[str, object]]] = {
    "Read": lambda path: {"file_path": path},
    "read": lambda path: {"filePath": path},
    "exec_command": lambda path: {"cmd": f"cat {path}"},
    "shell_command": lambda path: {"command": f"cat {path}"},
    "shell": lambda path: {"command": ["cat", path]},
    "read_file": lambda path: {"path": path},
}
"""The arguments of a call, by the name of the tool that reads a file."""


def reply(prompt: str) -> str:
    """What the model says to a prompt of a template that writes calls as Hermes does."""
    asks, shown = list(_ASK.finditer(prompt)), _TOOLS.search(prompt)
    if not asks or shown is None:
        return "A file with a number"
    told = prompt[asks[-1].end() :]
    if _RESULT in told:
        numbers = _NUMBER.findall(told)
        return f"The number is {numbers[-1]}." if numbers else "There is no number."
    tools = [json.loads(line) for line in shown[1].splitlines() if line.startswith("{")]
    names = [tool.get("function", tool)["name"] for tool in tools]
    name = next((name for name in ARGUMENTS if name in names), None)
    if name is None:
        return f"No tool reads files: {', '.join(names)}"
    call = {"name": name, "arguments": ARGUMENTS[name](asks[-1][1])}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def engine() -> NoReturn:
    """The engine's process: it answers as `reply` says."""
    import msgspec

    from localkv.engine_process import child
    from localkv.engine_process.text_server import RunningText
    from localkv.engine_process.texts import Submit
    from localkv.llm import TextModel
    from localkv.structured.grammar import Grammar

    begun, log = RunningText.begun, os.environ.get("SCRIPTED_LOG")

    def scripted(model: TextModel, submit: Submit) -> RunningText:
        said = reply(model.detokenize(submit.ids))
        if log:
            with open(log, "a") as file:
                file.write(json.dumps(said) + "\n")
        grammar = Grammar.lark(f"start: {json.dumps(said)}")
        return begun(model, msgspec.structs.replace(submit, grammar=grammar))

    RunningText.begun = scripted  # type: ignore[method-assign,assignment]
    child.main()


def main() -> int:
    if sys.argv[1:] == ["engine"]:
        engine()
    from localkv import __main__
    from localkv.engine_process import client

    command = [sys.executable, "-P", str(Path(__file__).resolve()), "engine"]
    client.child_command = lambda module: command
    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
