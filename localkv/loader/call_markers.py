"""The control tokens by which models set a call of a tool apart from an answer.

They are part of an answer's text: without them nobody could tell which part of it is a call. In
most vocabularies such markers are no control tokens, and so part of the text in any case.
"""

from __future__ import annotations

CALL_MARKERS = (
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),  # Mistral
    *("<tool_call>", "</tool_call>"),  # Qwen, GLM, Hermes, Granite 4
    *("<|tool_call|>", "<|/tool_call|>"),  # Phi-4 mini, Granite 3
    "<|python_tag|>",  # Llama 3
    *("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
    *("<|START_ACTION|>", "<|END_ACTION|>"),  # Command
    *("<|tools_prefix|>", "<|tools_suffix|>"),  # Apertus
    *("<|tool_call>", "<tool_call|>", '<|"|>'),  # Gemma 4, and its quotation mark
    *("<minimax:tool_call>", "</minimax:tool_call>"),  # MiniMax
    *("<seed:tool_call>", "</seed:tool_call>"),  # Seed
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # DeepSeek
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # Kimi K2
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),  # GLM
    "｜DSML｜",  # DeepSeek V3.2 and V4
)
