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
    "bailing": "<role>SYSTEM</role> Be brief. <role>HUMAN</role>Hi<role>ASSISTANT"
    "</role>Yes?<role>HUMAN</role>Who?<role>ASSISTANT</role>",
    "bailing-think": "<role>SYSTEM</role> Be brief. <role>HUMAN</role>Hi<role>ASSISTANT"
    "</role>Yes?<role>HUMAN</role>Who?<role>ASSISTANT</role><think>",
    "bailing2": "<role>SYSTEM</role> Be brief. <|role_end|><role>HUMAN</role>Hi"
    "<|role_end|><role>ASSISTANT</role>Yes?<|role_end|><role>HUMAN"
    "</role>Who?<|role_end|><role>ASSISTANT</role>",
    "chatglm3": "[gMASK]sop<|system|>\n  Be brief. <|user|>\n Hi<|assistant|>\n"
    " Yes?<|user|>\n Who?<|assistant|>",
    "chatglm4": "[gMASK]<sop><|system|>\n Be brief. <|user|>\nHi<|assistant|>\n"
    "Yes?<|user|>\nWho?<|assistant|>\n",
    "deepseek": " Be brief. ### Instruction:\nHi\n### Response:\nYes?\n<|EOT|>\n"
    "### Instruction:\nWho?\n### Response:\n",
    "deepseek2": " Be brief. \n\nUser: Hi\n\nAssistant: Yes?"
    "<｜end▁of▁sentence｜>User: Who?\n\nAssistant:",
    "exaone3": "[|system|]Be brief.[|endofturn|]\n[|user|]Hi\n[|assistant|]Yes?"
    "[|endofturn|]\n[|user|]Who?\n[|assistant|]",
    "exaone4": "[|system|]Be brief.[|endofturn|]\n[|user|]Hi\n[|assistant|]Yes?"
    "[|endofturn|]\n[|user|]Who?\n[|assistant|]",
    "falcon3": "<|system|>\n Be brief. \n<|user|>\nHi\n<|assistant|>\nYes?\n"
    "<|user|>\nWho?\n<|assistant|>\n",
    "gigachat": "<s> Be brief. <|message_sep|>user<|role_sep|>Hi"
    "<|message_sep|>available functions<|role_sep|>[]"
    "<|message_sep|>assistant<|role_sep|>Yes?<|message_sep|>user"
    "<|role_sep|>Who?<|message_sep|>available functions<|role_sep|>[]"
    "<|message_sep|>assistant<|role_sep|>",
    "glmedge": "<|system|>\n Be brief. <|user|>\nHi<|assistant|>\nYes?<|user|>\nWho?<|assistant|>",
    "gpt-oss": "<|start|>system<|message|> Be brief. <|end|><|start|>user"
    "<|message|>Hi<|end|><|start|>assistant<|message|>Yes?<|return|>"
    "<|start|>user<|message|>Who?<|end|><|start|>assistant",
    "granite": "<|start_of_role|>system<|end_of_role|> Be brief. <|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>Yes?<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Who?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "grok-2": "System: Be brief.<|separator|>\n\nHuman: Hi<|separator|>\n\n"
    "Assistant: Yes?<|separator|>\n\nHuman: Who?<|separator|>\n\n"
    "Assistant:",
    "hunyuan-dense": " Be brief. <｜hy_place▁holder▁no▁3｜><｜hy_User｜>Hi"
    "<｜hy_Assistant｜>Yes?<｜hy_place▁holder▁no▁2｜><｜hy_User｜>Who?"
    "<｜hy_Assistant｜>",
    "hunyuan-moe": "<|startoftext|> Be brief. <|extra_4|><|startoftext|>Hi"
    "<|extra_0|>Yes?<|eos|><|startoftext|>Who?<|extra_0|>",
    "kimi-k2": "<|im_system|>system<|im_middle|> Be brief. <|im_end|>"
    "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant"
    "<|im_middle|>Yes?<|im_end|><|im_user|>user<|im_middle|>Who?"
    "<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "llama2": "[INST]  Be brief. \nHi [/INST]Yes?</s>[INST] Who? [/INST]",
    "llama2-sys-bos": "[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\nHi [/INST]Yes?</s><s>"
    "[INST] Who? [/INST]",
    "llama2-sys-strip": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]Yes?</s>"
    "[INST] Who? [/INST]",
    "llama4": "<|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
    "<|header_start|>user<|header_end|>\n\nHi<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nYes?<|eot|>"
    "<|header_start|>user<|header_end|>\n\nWho?<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "megrez": "<|role_start|>system<|role_end|> Be brief. <|turn_end|>"
    "<|role_start|>user<|role_end|>Hi<|turn_end|>"
    "<|role_start|>assistant<|role_end|>Yes?<|turn_end|>"
    "<|role_start|>user<|role_end|>Who?<|turn_end|>"
    "<|role_start|>assistant<|role_end|>",
    "minicpm": "Be brief.<用户>Hi<AI>Yes?<用户>Who?<AI>",
    "mistral-v1": " [INST]  Be brief. \n\nHi [/INST] Yes?</s> [INST] Who? [/INST]",
    "mistral-v3": "[INST]  Be brief. \n\nHi[/INST] Yes?</s>[INST] Who?[/INST]",
    "mistral-v3-tekken": "[INST] Be brief. \n\nHi[/INST]Yes?</s>[INST]Who?[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT]  Be brief. [/SYSTEM_PROMPT][INST] Hi[/INST] Yes?"
    "</s>[INST] Who?[/INST]",
    "monarch": "system\n Be brief. </s>\n<s>user\nHi</s>\n<s>assistant\nYes?</s>\n"
    "<s>user\nWho?</s>\n<s>assistant\n",
    "openchat": " Be brief. <|end_of_turn|>GPT4 Correct User: Hi"
    "<|end_of_turn|>GPT4 Correct Assistant: Yes?"
    "<|end_of_turn|>GPT4 Correct User: Who?"
    "<|end_of_turn|>GPT4 Correct Assistant:",
    "orion": "Human:  Be brief. \n\nHi\n\nAssistant: </s>Yes?</s>Human: Who?\n\nAssistant: </s>",
    "pangu-embedded": "[unused9]系统： Be brief. [unused10][unused9]用户：Hi[unused10]"
    "[unused9]助手：Yes?[unused10][unused9]用户：Who?[unused10]"
    "[unused9]助手：",
    "rwkv-world": "System: Be brief.\n\nUser: Hi\n\nAssistant: Yes?\n\nUser: Who?\n\nAssistant:",
    "seed_oss": "<seed:bos>system\n Be brief. <seed:eos><seed:bos>user\nHi"
    "<seed:eos><seed:bos>assistant\nYes?<seed:eos><seed:bos>user\nWho?"
    "<seed:eos><seed:bos>assistant\n",
    "smolvlm": "<|im_start|> Be brief. \n\nUser: Hi<end_of_utterance>\n"
    "Assistant: Yes?<end_of_utterance>\nUser: Who?<end_of_utterance>\n"
    "Assistant:",
    "vicuna-orca": "SYSTEM:  Be brief. \nUSER: Hi\nASSISTANT: Yes?</s>\nUSER: Who?\nASSISTANT:",
    "yandex": "  Be brief. \n\n Пользователь: Hi\n\n Ассистент: Yes?\n\n"
    " Пользователь: Who?\n\n Ассистент:[SEP]",
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
LLAMA_CPP_NAMES = """
bailing bailing-think bailing2 chatglm3 chatglm4 chatml command-r deepseek deepseek2 deepseek3
exaone3 exaone4 falcon3 gemma gigachat glmedge gpt-oss granite grok-2 hunyuan-dense hunyuan-moe
kimi-k2 llama2 llama2-sys llama2-sys-bos llama2-sys-strip llama3 llama4 megrez minicpm mistral-v1
mistral-v3 mistral-v3-tekken mistral-v7 mistral-v7-tekken monarch openchat orion pangu-embedded phi3
phi4 rwkv-world seed_oss smolvlm vicuna vicuna-orca yandex zephyr
"""


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_prompts_of_each(name: str) -> None:
    template = ChatTemplate(NAMED_TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    assert template.render(MESSAGES) == PROMPTS[name]


def test_every_name_of_llama_cpp_is_known() -> None:
    assert set(LLAMA_CPP_NAMES.split()) == set(NAMED_TEMPLATES)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("bailing2", "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Hi"),
        ("pangu-embedded", "[unused9]系统：[unused10][unused9]用户：Hi"),
        ("gemma", "<start_of_turn>user\nHi"),
        ("orion", "Human: Hi"),
        ("llama2-sys", "[INST] Hi"),
    ],
)
def test_a_conversation_without_a_system_message(name: str, start: str) -> None:
    template = ChatTemplate(NAMED_TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    assert template.render(MESSAGES[1:2]).startswith(start)


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
