"""Find the sentence that is nearest to another one: `python examples/embed.py [MODEL] [SENTENCE]`.

Any model will do, though one that was trained for embeddings does better.
"""

import sys

from localkv import LLM

SENTENCES = [
    "Mia the fox lost her red drum near the river.",
    "Omar the bee baked a cake for his friends.",
    "The wind blew hard, and snow fell on the hill.",
    "Ruth the crab found a gold ring in the sand.",
]

model = sys.argv[1] if len(sys.argv) > 1 else "models/tales-4M-F16.gguf"
sentence = sys.argv[2] if len(sys.argv) > 2 else "Mia the fox could not find her drum."

with LLM(model) as llm:
    vectors = llm.embed(SENTENCES)  # float32 [sentences, n_embd], each of norm 1
    (wanted,) = llm.embed(sentence)
similarities = vectors @ wanted

print(sentence)
for at in (-similarities).argsort():
    print(f"{similarities[at]:6.3f}  {SENTENCES[at]}")
