"""Seed-OSS: Qwen3-Coder's calls between marks of its own, with values that are in no line alone."""

from __future__ import annotations

from localkv.tool_calls.xml_parameters import xml_family

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"

SEED_OSS = xml_family("seed-oss", OPEN, CLOSE, in_lines=False)
