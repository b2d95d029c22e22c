"""Chat templates by name: prompts as llama.cpp's `llama_chat_apply_template` makes them."""

from __future__ import annotations

import json

import pytest

from localkv.loader.chat_template import ChatTemplate
from localkv.loader.named_templates import NAMED_TEMPLATES

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Who?"},
]
PROMPTS = {
    "chatml": "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "command-r": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yes?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Who?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "deepseek3": " Be brief. \n\n<｜User｜>Hi<｜Assistant｜>Yes?<｜end▁of▁sentence｜>"
    "<｜User｜>Who?<｜Assistant｜>",
    "gemma": "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?"
    "<end_of_turn>\n<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n",
    "llama2-sys": "[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\nHi [/INST]Yes?</s>[INST] Who? [/INST]",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-v7-tekken": "[SYSTEM_PROMPT] Be brief. [/SYSTEM_PROMPT][INST]Hi[/INST]Yes?</s>"
    "[INST]Who?[/INST]",
    "phi3": "<|system|>\n Be brief. <|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes?<|end|>\n"
    "<|user|>\nWho?<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|> Be brief. <|im_end|><|im_start|>user<|im_sep|>Hi"
    "<|im_end|><|im_start|>assistant<|im_sep|>Yes?<|im_end|><|im_start|>user<|im_sep|>Who?"
    "<|im_end|><|im_start|>assistant<|im_sep|>",
    "vicuna": " Be brief. \n\nUSER: Hi\nASSISTANT: Yes?</s>\nUSER: Who?\nASSISTANT:",
    "zephyr": "<|system|>\n Be brief. <|endoftext|>\n<|user|>\nHi<|endoftext|>\n<|assistant|>\nYes?"
    "<|endoftext|>\n<|user|>\nWho?<|endoftext|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_prompts_of_each(name: str) -> None:
    template = ChatTemplate(NAMED_TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    assert template.render(MESSAGES) == PROMPTS[name]


def test_functions_are_told_as_text() -> None:
    source = "{{ 'functools[' + functions }}"
    template = ChatTemplate(source, bos_token="", eos_token="")
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert template.takes_tools
    assert json.loads(template.render(MESSAGES, tools=tools)[len("functools[") :]) == [
        {"name": "look"}
    ]
    assert template.render(MESSAGES) == "functools[[]"
    assert template.render(MESSAGES, tools=tools, functions="mine") == "functools[mine"


def test_a_template_is_told_the_date() -> None:
    template = ChatTemplate("{{ date_string }}|{{ datetime }}", bos_token="", eos_token="")
    day, other = template.render(MESSAGES).split("|")
    assert sorted(day.split()) == sorted(other.split())
    assert template.render(MESSAGES, date_string="today", datetime="x") == "today|x"
