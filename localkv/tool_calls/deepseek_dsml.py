"""DeepSeek V3.2 and V4: `<｜DSML｜invoke name="NAME">`, whose values say what they are."""

from __future__ import annotations

from localkv.tool_calls.family import Family
from localkv.tool_calls.invoke_tags import InvokeTags

PREFIX = "｜DSML｜"
MARK, V4_MARK = f"<{PREFIX}function_calls>", f"<{PREFIX}tool_calls>"


def _family(name: str, mark: str) -> Family:
    return InvokeTags(mark, mark.replace("<", "</"), PREFIX, says_string=True).family(name)


DSML, DSML_V4 = _family("deepseek-dsml", MARK), _family("deepseek-dsml-v4", V4_MARK)
