"""MiniMax M2: `<invoke name="NAME">` in `<minimax:tool_call>`; the schema says what is JSON."""

from __future__ import annotations

from localkv.tool_calls.invoke_tags import InvokeTags

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"

MINIMAX = InvokeTags(OPEN, CLOSE).family("minimax")
