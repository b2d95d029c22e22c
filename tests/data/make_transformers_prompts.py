"""Write transformers_prompts.json: what transformers makes of conversations with templates/*.jinja.

Run it after a template or a conversation was changed, where transformers is installed:

    python tests/data/make_transformers_prompts.py

The templates are the tests' own, in the manner of the families' that they are named after: each
has the constructs that its family's template has. An error of a template is recorded as null, the
same text as an option's before as that one's number, and what is left out as -1. The clock stands
still, as in the tests.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import transformers
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
NOW = datetime.datetime(2026, 7, 4, 12, 30)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": "Be short. Ü"}
USER = {"role": "user", "content": " How is it in Bern?\n"}
MORE = {"role": "user", "content": "Thanks <|im_end|> & bye"}
ANSWER = {"role": "assistant", "content": "Fine.\n"}
REASONED = {**ANSWER, "reasoning_content": "Let me\nsee."}
INLINE = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nFine."}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place, in °C & <words>.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Its name."},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"type": ["string", "null"]},
            },
            "required": ["place"],
        },
    },
}
OTHER = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


def call(number: int, arguments: object) -> dict[str, object]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, content: str) -> dict[str, object]:
    identity = {"tool_call_id": f"call0000{number}", "name": "weather"}
    return {"role": "tool", "content": content, **identity}


BERN = {"place": "Bern", "days": 2, "tags": ["a", "ü"], "more": None, "exact": True}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call(1, BERN)]}
TWICE = {**CALLS, "tool_calls": [call(1, BERN), call(2, {"place": "Zürich"})]}
AS_TEXT = {**CALLS, "tool_calls": [call(1, json.dumps(BERN, ensure_ascii=False))]}

CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, MORE],
    "reasoned": [USER, REASONED, MORE],
    "inline": [SYSTEM, USER, INLINE, MORE],
    "last": [USER, REASONED],
    "call": [USER, {**CALLS, "reasoning_content": "I look."}, result(1, '{"t": 21}')],
    "calls": [SYSTEM, USER, TWICE, result(1, "21"), result(2, "19"), ANSWER, MORE],
    "call_as_text": [USER, AS_TEXT, result(1, "21")],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " one "}]}],
    "wrong": [USER, MORE],
}
WITH_TOOLS = ("user", "system", "calls")
OPTIONS = {
    "plain": {},
    "asked": {"add_generation_prompt": True},
    "tools": {"add_generation_prompt": True, "tools": [TOOL, OTHER]},
    "on": {"add_generation_prompt": True, "enable_thinking": True, "thinking": True},
    "off": {"add_generation_prompt": True, "enable_thinking": False, "thinking": False},
    "more": {
        "add_generation_prompt": True,
        "documents": [{"doc_id": 1, "text": "Ü <doc>"}],
        "reasoning_effort": "high",
        "thinking_budget": 600,
        "clear_thinking": False,
        "keep_past_thinking": True,
        "skip_think": False,
        "builtin_tools": ["python", "browser"],
        "controls": {"length": "long"},
    },
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return NOW


def rendered(source: str, messages: list[dict], options: dict) -> str | None:
    """One prompt."""
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], chat_template=source, **TOKENS, **options
        )
    except Exception:
        return None
    return texts[0]


def main() -> None:
    chat_template_utils.datetime = Clock
    prompts = {}
    for path in sorted((HERE / "templates").glob("*.jinja")):
        found: dict[str, list[str | int | None]] = {}
        for name, messages in CONVERSATIONS.items():
            found[name] = []
            for kind, options in OPTIONS.items():
                if kind == "tools" and name not in WITH_TOOLS:
                    found[name].append(-1)
                    continue
                text = rendered(path.read_text(), messages, options)
                # a number stands for the same text as that of an earlier option
                found[name].append(found[name].index(text) if text in found[name] else text)
        prompts[path.stem] = found
        print(f"{path.stem}: {sum(None in texts for texts in found.values())} refused")
    recorded = {
        "transformers": transformers.__version__,
        "now": NOW.isoformat(),
        **TOKENS,
        "conversations": CONVERSATIONS,
        "options": OPTIONS,
        "prompts": prompts,
    }
    target = HERE / "transformers_prompts.json"
    text = json.dumps(recorded, ensure_ascii=False, separators=(",", ":"))
    target.write_text(text.replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
