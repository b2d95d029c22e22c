"""Chat templates by name, for files without one, or with a broken one.

Names and prompts are the ones of llama.cpp's `--chat-template` (`llama-chat.cpp`). A
role that a format has no place for, such as a tool's, takes the user's.
"""

from __future__ import annotations

import re

_END = "{% endfor %}"
_VALUES = {
    "{text}": "message.content",
    "{trimmed}": "message.content | trim",
    "{role}": "message.role",
    "{ROLE}": "message.role | upper",
    "{Role}": "message.role | capitalize",
}


def _spelt(turn: str) -> str:
    """A turn such as "<|user|>{text}" in Jinja; line breaks are kept."""
    parts = re.split(r"(\{\w+\})", turn)
    return "".join(f"{{{{ {_VALUES.get(part, repr(part))} }}}}" for part in parts if part)


def _asking(opening: str) -> str:
    """What opens the model's turn."""
    return f"{{% if add_generation_prompt %}}{_spelt(opening)}{{% endif %}}" if opening else ""


def _turns(
    user: str,
    assistant: str = "",
    system: str = "",
    opening: str = "",
    *,
    before: str = "",
    **others: str,
) -> str:
    """A template that writes one turn after the other.

    Args:
        user: the turn of a user, and of every other role that has none.
        assistant, system: their turns; "" if they are like the user's.
        opening: what comes before the answer.
        before: what comes before everything.
        others: turns of other roles.
    """
    turns = {"system": system, "assistant": assistant, **others}
    named = [(role, turn) for role, turn in turns.items() if turn]
    tests = "".join(
        f"{{% {'elif' if i else 'if'} message.role == '{role}' %}}{_spelt(turn)}"
        for i, (role, turn) in enumerate(named)
    )
    body = f"{tests}{{% else %}}{_spelt(user)}{{% endif %}}" if named else _spelt(user)
    return f"{_spelt(before)}{{% for message in messages %}}{body}{_END}{_asking(opening)}"


def _instructed(
    opening: str, system: str, user: str, assistant: str, *, again: str | None = None
) -> str:
    """A template that opens an instruction, which also holds the system's text.

    Args:
        opening: the beginning of an instruction.
        system, user, assistant: their texts; the assistant's ends the turn.
        again: the beginning of each further instruction; None if it is like the first.
    """
    further = opening if again is None else again
    return (
        "{% set ns = namespace(inside=false) %}{% for message in messages %}"
        "{% if not ns.inside %}{% set ns.inside = true %}"
        f"{{% if loop.first %}}{_spelt(opening)}{{% else %}}{_spelt(further)}{{% endif %}}"
        "{% endif %}"
        f"{{% if message.role == 'system' %}}{_spelt(system)}"
        f"{{% elif message.role == 'assistant' %}}{_spelt(assistant)}{{% set ns.inside = false %}}"
        f"{{% else %}}{_spelt(user)}{{% endif %}}{_END}"
    )


def _merging(before: str, user: str, assistant: str, opening: str = "", *, text: str) -> str:
    """A template without a place for the system, whose text goes into the next user's turn.

    Args:
        before: the beginning of a user's turn, which the system's text and an empty line follow.
        user: the rest of a user's turn.
        assistant: an answer.
        opening: what comes before the answer.
        text: how the system's text is put, "{text}" or "{trimmed}".
    """
    return (
        "{% set ns = namespace(system='') %}{% for message in messages %}"
        "{% if message.role == 'system' %}"
        f"{{% set ns.system = ns.system + ({_VALUES[text]}) %}}"
        f"{{% elif message.role == 'assistant' %}}{_spelt(assistant)}"
        f"{{% else %}}{_spelt(before)}"
        "{% if ns.system %}{{ ns.system + '\\n\\n' }}{% set ns.system = '' %}{% endif %}"
        f"{_spelt(user)}{{% endif %}}{_END}{_asking(opening)}"
    )


def _llama2(system: str, text: str = "{text}", *, again: str | None = None) -> str:
    user, assistant = f"{text} [/INST]", f"{text}</s>"
    return _instructed("[INST] ", system, user, assistant, again=again)


def _bailing(opening: str, *, end: str = "") -> str:
    user, other = (f"<role>{role}</role>{{text}}{end}" for role in ("HUMAN", "{ROLE}"))
    return _turns(user, other, other, opening)


def _pangu(name: str) -> str:
    return f"[unused9]{name}：{{text}}[unused10]"


_SYS, _TRIMMED_SYS = (f"<<SYS>>\n{text}\n<</SYS>>\n\n" for text in ("{text}", "{trimmed}"))
_COHERE = "<|START_OF_TURN_TOKEN|><|%s_TOKEN|>{trimmed}<|END_OF_TURN_TOKEN|>"

NAMED_TEMPLATES = {
    "bailing": _bailing("<role>ASSISTANT</role>"),
    "bailing-think": _bailing("<role>ASSISTANT</role><think>"),
    "bailing2": "{% if messages[0].role != 'system' %}"
    + _spelt("<role>SYSTEM</role>detailed thinking off<|role_end|>")
    + "{% endif %}"
    + _bailing("<role>ASSISTANT</role>", end="<|role_end|>"),
    "chatglm3": _turns("<|{role}|>\n {text}", opening="<|assistant|>", before="[gMASK]sop"),
    "chatglm4": _turns("<|{role}|>\n{text}", opening="<|assistant|>\n", before="[gMASK]<sop>"),
    "chatml": _turns("<|im_start|>{role}\n{text}<|im_end|>\n", opening="<|im_start|>assistant\n"),
    "command-r": _turns(
        _COHERE % "USER",
        _COHERE % "CHATBOT",
        _COHERE % "SYSTEM",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "deepseek": _turns(
        "### Instruction:\n{text}\n",
        "### Response:\n{text}\n<|EOT|>\n",
        "{text}",
        "### Response:\n",
    ),
    "deepseek2": _turns(
        "User: {text}\n\n", "Assistant: {text}<｜end▁of▁sentence｜>", "{text}\n\n", "Assistant:"
    ),
    "deepseek3": _turns(
        "<｜User｜>{text}",
        "<｜Assistant｜>{text}<｜end▁of▁sentence｜>",
        "{text}\n\n",
        "<｜Assistant｜>",
    ),
    "exaone3": _turns(
        "[|user|]{trimmed}\n",
        "[|assistant|]{trimmed}[|endofturn|]\n",
        "[|system|]{trimmed}[|endofturn|]\n",
        "[|assistant|]",
    ),
    "exaone4": _turns(
        "[|user|]{trimmed}\n",
        "[|assistant|]{trimmed}[|endofturn|]\n",
        "[|system|]{trimmed}[|endofturn|]\n",
        "[|assistant|]",
        tool="[|tool|]{trimmed}[|endofturn|]\n",
    ),
    "falcon3": _turns("<|{role}|>\n{text}\n", opening="<|assistant|>\n"),
    "gemma": _merging(
        "<start_of_turn>user\n",
        "{trimmed}<end_of_turn>\n",
        "<start_of_turn>model\n{trimmed}<end_of_turn>\n",
        "<start_of_turn>model\n",
        text="{trimmed}",
    ),
    "gigachat": _turns(
        "user<|role_sep|>{text}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>{text}<|message_sep|>",
        "{text}<|message_sep|>",
        "assistant<|role_sep|>",
        before="<s>",
    ),
    "glmedge": _turns("<|{role}|>\n{text}", opening="<|assistant|>"),
    "gpt-oss": _turns(
        "<|start|>{role}<|message|>{text}<|end|>",
        "<|start|>{role}<|message|>{text}<|return|>",
        opening="<|start|>assistant",
    ),
    "granite": _turns(
        "<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n",
        opening="<|start_of_role|>assistant<|end_of_role|>",
    ),
    "grok-2": _turns(
        "Human: {trimmed}<|separator|>\n\n",
        "Assistant: {text}<|separator|>\n\n",
        "System: {trimmed}<|separator|>\n\n",
        "Assistant:",
    ),
    "hunyuan-dense": _turns(
        "<｜hy_User｜>{text}<｜hy_Assistant｜>",
        "{text}<｜hy_place▁holder▁no▁2｜>",
        "{text}<｜hy_place▁holder▁no▁3｜>",
    ),
    "hunyuan-moe": _turns(
        "<|startoftext|>{text}<|extra_0|>", "{text}<|eos|>", "<|startoftext|>{text}<|extra_4|>"
    ),
    "kimi-k2": _turns(
        "<|im_user|>user<|im_middle|>{text}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{text}<|im_end|>",
        "<|im_system|>system<|im_middle|>{text}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
        tool="<|im_system|>tool<|im_middle|>{text}<|im_end|>",
    ),
    "llama2": _llama2("{text}\n"),
    "llama2-sys": _llama2(_SYS),
    "llama2-sys-bos": _llama2(_SYS, again="<s>[INST] "),
    "llama2-sys-strip": _llama2(_TRIMMED_SYS, "{trimmed}"),
    "llama3": _turns(
        "<|start_header_id|>{role}<|end_header_id|>\n\n{trimmed}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": _turns(
        "<|header_start|>{role}<|header_end|>\n\n{trimmed}<|eot|>",
        opening="<|header_start|>assistant<|header_end|>\n\n",
    ),
    "megrez": _turns(
        "<|role_start|>{role}<|role_end|>{text}<|turn_end|>",
        opening="<|role_start|>assistant<|role_end|>",
    ),
    "minicpm": _turns("<用户>{trimmed}<AI>", "{trimmed}", "{trimmed}"),
    "mistral-v1": _instructed(" [INST] ", "{text}\n\n", "{text} [/INST]", " {text}</s>"),
    "mistral-v3": _instructed("[INST] ", "{text}\n\n", "{text}[/INST]", " {trimmed}</s>"),
    "mistral-v3-tekken": _instructed("[INST]", "{text}\n\n", "{text}[/INST]", "{text}</s>"),
    "mistral-v7": _turns(
        "[INST] {text}[/INST]", " {text}</s>", "[SYSTEM_PROMPT] {text}[/SYSTEM_PROMPT]"
    ),
    "mistral-v7-tekken": _turns(
        "[INST]{text}[/INST]", "{text}</s>", "[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]"
    ),
    "monarch": "{% for message in messages %}{% if not loop.first %}<s>{% endif %}"
    + _spelt("{role}\n{text}</s>\n")
    + _END
    + _asking("<s>assistant\n"),
    "openchat": _turns(
        "GPT4 Correct {Role}: {text}<|end_of_turn|>",
        system="{text}<|end_of_turn|>",
        opening="GPT4 Correct Assistant:",
    ),
    "orion": _merging("Human: ", "{text}\n\nAssistant: </s>", "{text}</s>", text="{text}"),
    "pangu-embedded": "{% if messages[0].role != 'system' %}"
    + _spelt("[unused9]系统：[unused10]")
    + "{% endif %}"
    + _turns(
        _pangu("用户"),
        _pangu("助手"),
        _pangu("系统"),
        "[unused9]助手：",
        tool=_pangu("工具"),
        function=_pangu("方法"),
    ),
    "phi3": _turns("<|{role}|>\n{text}<|end|>\n", opening="<|assistant|>\n"),
    "phi4": _turns(
        "<|im_start|>{role}<|im_sep|>{text}<|im_end|>", opening="<|im_start|>assistant<|im_sep|>"
    ),
    "rwkv-world": _turns(
        "User: {trimmed}\n\n", "Assistant: {trimmed}\n\n", "System: {trimmed}\n\n", "Assistant:"
    ),
    "seed_oss": _turns(
        "<seed:bos>{role}\n{text}<seed:eos>",
        "<seed:bos>{role}\n{trimmed}<seed:eos>",
        opening="<seed:bos>assistant\n",
    ),
    "smolvlm": _turns(
        "User: {text}<end_of_utterance>\n",
        "Assistant: {text}<end_of_utterance>\n",
        "{text}\n\n",
        "Assistant:",
        before="<|im_start|>",
    ),
    "vicuna": _turns("USER: {text}\n", "ASSISTANT: {text}</s>\n", "{text}\n\n", "ASSISTANT:"),
    "vicuna-orca": _turns(
        "USER: {text}\n", "ASSISTANT: {text}</s>\n", "SYSTEM: {text}\n", "ASSISTANT:"
    ),
    "yandex": _turns(
        " Пользователь: {text}\n\n", " Ассистент: {text}\n\n", " {text}\n\n", " Ассистент:[SEP]"
    ),
    "zephyr": _turns("<|{role}|>\n{text}<|endoftext|>\n", opening="<|assistant|>\n"),
}
"""Jinja programs by name."""
