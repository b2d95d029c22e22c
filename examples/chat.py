"""A conversation, one line of stdin at a time: `python examples/chat.py [MODEL]`.

$ printf 'My name is Anna.\nWhat is my name?\n' | python examples/chat.py
"""

import sys

from localkv import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"

# exact=False keeps answers in the cache as they were written, so the next turn begins sooner
llm = LLM(model, n_ctx=2048, exact=False)
messages: list[dict[str, str]] = []

print("> ", end="", flush=True)
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    stream = llm.chat(messages, max_tokens=200, temperature=0)
    for piece in stream:
        print(piece, end="", flush=True)
    answer = stream.completion
    messages.append({"role": "assistant", "content": answer.text})
    used = answer.usage
    print(f"  [{used.total_tokens} of {llm.cache.n_ctx} tokens, {used.cached_tokens} reused]")
    print("> ", end="", flush=True)
print()
