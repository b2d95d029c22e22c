"""Print a text while it is generated, and end it early: `python examples/stream.py [MODEL]`."""

import sys

from localkv import LLM, LocalKVError

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"

try:
    llm = LLM(model, n_ctx=1024)
except LocalKVError as error:  # a missing file, a damaged one, not enough memory
    sys.exit(f"error: {error}")

stream = llm.stream("Leo was a young owl", temperature=0.5, seed=2, stop=["\n"])
sentences = 0
for piece in stream:
    print(piece, end="", flush=True)
    sentences += piece.count(".")
    if sentences == 3:
        stream.close()

print(f"\n\n{stream.completion.finish_reason} after three sentences")
print(f"{stream.completion.usage.completion_tokens} tokens")
