"""What cache types cost in quality: `python examples/sweep.py [MODEL] [TEXT FILE]`."""

import sys
from pathlib import Path

from localkv import LLM
from localkv.config import CacheConfig
from localkv.quality.scores import (
    base_cache,
    divergence,
    joined,
    perplexity,
    score_chunks,
    text_chunks,
)

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"
text = Path(sys.argv[2] if len(sys.argv) > 2 else "models/notes.txt").read_text()
n_ctx = 256
pairs = [("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q4_0", "q4_0")]

llm = LLM(model, n_ctx=n_ctx)
chunks = text_chunks(llm.tokenize(text), n_ctx, bos_id=llm.tokenizer.bos_id)
caches = [CacheConfig(type_k, type_v, n_ctx=n_ctx) for type_k, type_v in pairs]

# for each chunk of the text, the scores of every cache, compared with an f16 cache
parts = list(score_chunks(llm.engine.model, chunks, caches, base=base_cache(n_ctx)))

print(f"{len(chunks)} chunks of {n_ctx} tokens")
print("K/V        perplexity  divergence from f16  same top token")
for (type_k, type_v), of_cache in zip(pairs, zip(*parts, strict=True), strict=True):
    scores = joined(of_cache)
    moved = divergence(scores)
    print(f"{type_k + '/' + type_v:10} {perplexity(scores.nll).value:10.4f}", end="")
    print(f"   {moved.kld.value:7.1e} ± {moved.kld.error:5.0e}  {moved.same_top.value:14.1%}")
