"""A conversation of two turns with calls of a tool, by each client library that there is.

Each goes on with what the library gave it, unchanged, and with a system message between the turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.scripted_server import ASK

SYSTEM = "You work on files."
LATE = "The user has opened another file."
TOOL = "read_file"
DESCRIPTION = "Reads a file."
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "of the file"}},
    "required": ["path"],
}
FUNCTION: dict[str, Any] = {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}
FILES = {"notes.txt": "the number is 4711", "more.txt": "the number is 815"}
"""The files that are asked for, one a turn, and what is in them."""
ANSWERS = ["The number is 4711.", "The number is 815."]
MOST_CALLS = 3
"""Most calls of a turn."""


@dataclass
class Talk:
    """What came of it.

    Attributes:
        answers: one a turn.
        calls: the paths that the tool was called with.
    """

    answers: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def read(self, arguments: Any) -> str:
        """The tool."""
        path = (json.loads(arguments) if isinstance(arguments, str) else arguments)["path"]
        self.calls.append(path)
        if len(self.calls) > 2 * MOST_CALLS:
            raise RuntimeError("the model goes on calling")
        return FILES[Path(path).name]

    def hold(self, messages: list[Any], said: Callable[[], Any], late: Sequence[Any] = ()) -> Talk:
        """Hold a conversation of chat completions.

        Args:
            messages: so far; the rest is added.
            said: asks for the model's next message.
            late: messages after each answer.
        """
        for name in FILES:
            messages.append({"role": "user", "content": ASK.format(path=name)})
            while (message := said()).tool_calls:
                messages.append(message)
                for call in message.tool_calls:
                    content = self.read(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            messages += [message, *late]
            self.answers.append(message.content)
        return self


def openai_chat(url: str, model: str, *, streams: bool = False) -> Talk:
    """OpenAI's library, chat completions."""
    import openai

    messages = list[Any]([{"role": "developer", "content": SYSTEM}])
    tools = [{"type": "function", "function": FUNCTION}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def said() -> Any:
            asked: Any = {"model": model, "messages": messages, "tools": tools}
            if not streams:
                return client.chat.completions.create(**asked).choices[0].message
            with client.chat.completions.stream(**asked) as stream:
                return stream.get_final_completion().choices[0].message

        return Talk().hold(messages, said, [{"role": "system", "content": LATE}])


def openai_responses(url: str, model: str, *, streams: bool = False) -> Talk:
    """OpenAI's library, responses."""
    import openai

    talk, items = Talk(), list[Any]()
    tools = [{"type": "function", **FUNCTION}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def said() -> Any:
            asked: Any = {"model": model, "input": items, "tools": tools, "store": False}
            asked["instructions"] = SYSTEM
            if not streams:
                return client.responses.create(**asked)
            with client.responses.stream(**asked) as stream:
                return stream.get_final_response()

        for name in FILES:
            items.append({"role": "user", "content": ASK.format(path=name)})
            while (done := said()).output[-1].type == "function_call":
                items += done.output
                for call in done.output:
                    if call.type == "function_call":
                        result = {"call_id": call.call_id, "output": talk.read(call.arguments)}
                        items.append({"type": "function_call_output", **result})
            items += [*done.output, {"role": "developer", "content": LATE}]
            talk.answers.append(done.output_text)
    return talk


def anthropic_messages(url: str, model: str, *, streams: bool = False) -> Talk:
    """Anthropic's library."""
    import anthropic

    talk, messages = Talk(), list[Any]()
    tools = [{"name": TOOL, "description": DESCRIPTION, "input_schema": PARAMETERS}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:

        def said() -> Any:
            asked: Any = {"model": model, "messages": messages, "tools": tools, "system": SYSTEM}
            asked["max_tokens"] = 200
            if not streams:
                return client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                return stream.get_final_message()

        for name in FILES:
            messages.append({"role": "user", "content": ASK.format(path=name)})
            while (message := said()).stop_reason == "tool_use":
                messages.append({"role": "assistant", "content": message.content})
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": [{"type": "text", "text": talk.read(block.input)}],
                    }
                    for block in message.content
                    if block.type == "tool_use"
                ]
                messages.append({"role": "user", "content": results})
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "system", "content": LATE})
            talk.answers.append("".join(block.text for block in message.content))
    return talk


def ollama_chat(url: str, model: str, *, streams: bool = False) -> Talk:
    """ollama's library, which makes the tool's description from a function."""
    import ollama

    talk, messages = Talk(), list[Any]([{"role": "system", "content": SYSTEM}])

    def read_file(path: str) -> str:
        """Reads a file.

        Args:
            path: of the file
        """
        return talk.read({"path": path})

    with ollama.Client(host=url) as client:

        def said() -> Any:
            asked: Any = {"model": model, "messages": messages, "tools": [read_file]}
            if not streams:
                return client.chat(**asked).message
            whole = ollama.Message(role="assistant", content="")
            for chunk in client.chat(**asked, stream=True):
                whole.content += chunk.message.content or ""
                whole.tool_calls = [*(whole.tool_calls or ()), *(chunk.message.tool_calls or ())]
            return whole

        for name in FILES:
            messages.append({"role": "user", "content": ASK.format(path=name)})
            while (message := said()).tool_calls:
                messages.append(message)
                for call in message.tool_calls:
                    content = read_file(**call.function.arguments)
                    messages.append({"role": "tool", "tool_name": TOOL, "content": content})
            messages += [message, {"role": "system", "content": LATE}]
            talk.answers.append(message.content)
    return talk


CONVERSATIONS: dict[str, Callable[..., Talk]] = {
    "openai, chat completions": openai_chat,
    "openai, responses": openai_responses,
    "anthropic": anthropic_messages,
    "ollama": ollama_chat,
}
"""Conversations by library, called with the server's URL, a model's name, and whether to stream."""
