"""How likely each token of a text is: `python examples/logprobs.py [MODEL] [TEXT]`."""

import sys

import numpy as np

from localkv import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"
text = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time there was a purple duck"

llm = LLM(model, n_ctx=512)
ids = llm.tokenize(text)
logits = llm.logits(ids)  # float32 [tokens, vocabulary]
logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

total = 0.0
print("log p  rank  token       instead")
for at in range(1, len(ids)):  # position `at - 1` predicts token `at`
    row = logprobs[at - 1]
    logprob = float(row[ids[at]])
    rank = int((row > row[ids[at]]).sum()) + 1
    best = llm.detokenize([int(row.argmax())])
    total += logprob
    print(f"{logprob:5.2f}  {rank:4}  {llm.detokenize([ids[at]])!r:10}  {best!r}")

mean = total / (len(ids) - 1)
print(f"\nmean log p {mean:.3f} over {len(ids) - 1} tokens")
