"""Continue a prompt: `python examples/complete.py [MODEL]`."""

import sys

from localkv import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"

llm = LLM(model, n_ctx=1024, cache_type_k="q8_0", cache_type_v="q4_0")
completion = llm.complete("Once upon a time", max_tokens=60, temperature=0.6, seed=7)

print("Once upon a time" + completion.text)
print(f"\n{completion.finish_reason} after {completion.usage.completion_tokens} tokens, ", end="")
print(f"{completion.timings.decode_per_second:.0f} tokens/s, seed {completion.seed}")
print(f"K and V take {(llm.memory.cache_k + llm.memory.cache_v) / 2**20:.2f} MiB")
