"""The most exact cache that fits a budget: `python examples/plan.py [MODEL] [MIB] [TOKENS]`.

Only the file's header is read, and torch is not imported.
"""

import sys

from localkv.config import CacheConfig
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.memory.plan import ModelMemory

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"
budget = int(float(sys.argv[2] if len(sys.argv) > 2 else 32) * 2**20)
n_ctx = int(sys.argv[3] if len(sys.argv) > 3 else 2048)

file = open_gguf(model)
config = model_spec(file)
memory = ModelMemory(tuple(file.tensors.values()), config, "cpu", n_batch=512, n_threads=2)

print(f"{n_ctx} tokens of context within {budget / 2**20:.1f} MiB")
chosen = None
for pair in [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")]:
    cache = CacheConfig(*pair, n_ctx=n_ctx)
    plan = memory.plan(cache)
    fits = plan.total <= budget
    chosen = chosen or (pair if fits else None)
    longest = memory.longest_context(cache, budget)
    print(f"{'/'.join(pair):10} {plan.total / 2**20:6.2f} MiB, ", end="")
    print(f"{'fits' if fits else 'too much'}; at most {longest} tokens")

if chosen is None:
    sys.exit("nothing fits; give more memory or fewer tokens")
print(f"LLM({model!r}, n_ctx={n_ctx}, cache_type_k={chosen[0]!r}, cache_type_v={chosen[1]!r})")
