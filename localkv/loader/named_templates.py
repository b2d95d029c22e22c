"""Chat templates by name, for files without one, or with a broken one.

The names are those of llama.cpp's `--chat-template`, and so are the prompts (`llama-chat.cpp`).
"""

from __future__ import annotations

_TURNS = "{% for message in messages %}"
_END = "{% endfor %}"


def _by_role(before: str, after: str, opening: str, *, text: str = "message.content") -> str:
    """A template whose turns differ in the role's name alone."""
    role = before.replace("ROLE", "{{ message.role }}")
    asked = "{% if add_generation_prompt %}" + opening + "{% endif %}"
    return f"{_TURNS}{role}{{{{ {text} }}}}{after}{_END}{asked}"


_TRIMMED = "message.content | trim"

NAMED_TEMPLATES = {
    "chatml": _by_role("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "command-r": (
        "{% set roles = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} %}"
        f"{_TURNS}<|START_OF_TURN_TOKEN|><|{{{{ roles[message.role] }}}}_TOKEN|>"
        f"{{{{ {_TRIMMED} }}}}<|END_OF_TURN_TOKEN|>{_END}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "deepseek3": (
        f"{_TURNS}"
        "{% if message.role == 'system' %}{{ message.content }}{{ '\n\n' }}"
        "{% elif message.role == 'user' %}<｜User｜>{{ message.content }}"
        "{% else %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>{% endif %}"
        f"{_END}{{% if add_generation_prompt %}}<｜Assistant｜>{{% endif %}}"
    ),
    "gemma": (
        "{% set ns = namespace(system='') %}"
        f"{_TURNS}"
        "{% if message.role == 'system' %}{% set ns.system = ns.system + message.content | trim %}"
        "{% else %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}"
        "{{ '\n' }}"
        "{% if ns.system and message.role != 'assistant' %}{{ ns.system + '\n\n' }}"
        "{% set ns.system = '' %}{% endif %}"
        f"{{{{ {_TRIMMED} }}}}<end_of_turn>\n{{% endif %}}{_END}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "llama2-sys": (
        "[INST] {% set ns = namespace(inside=true) %}"
        f"{_TURNS}"
        "{% if not ns.inside %}{% set ns.inside = true %}[INST] {% endif %}"
        "{% if message.role == 'system' %}"
        "{{ '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' }}"
        "{% elif message.role == 'user' %}{{ message.content }} [/INST]"
        "{% else %}{{ message.content }}</s>{% set ns.inside = false %}{% endif %}"
        f"{_END}"
    ),
    "llama3": _by_role(
        "<|start_header_id|>ROLE<|end_header_id|>\n\n",
        "<|eot_id|>",
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        text=_TRIMMED,
    ),
    "mistral-v7-tekken": (
        f"{_TURNS}"
        "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]"
        "{% elif message.role == 'user' %}[INST]{{ message.content }}[/INST]"
        "{% else %}{{ message.content }}</s>{% endif %}"
        f"{_END}"
    ),
    "phi3": _by_role("<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _by_role("<|im_start|>ROLE<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "vicuna": (
        f"{_TURNS}"
        "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
        "{% elif message.role == 'user' %}{{ 'USER: ' + message.content + '\n' }}"
        "{% else %}{{ 'ASSISTANT: ' + message.content + '</s>\n' }}{% endif %}"
        f"{_END}{{% if add_generation_prompt %}}ASSISTANT:{{% endif %}}"
    ),
    "zephyr": _by_role("<|ROLE|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}
"""Jinja programs by name."""
