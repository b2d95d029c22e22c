"""A program that uses the public API, for mypy: nothing in it may be `Any`."""

from __future__ import annotations

from localkv import LLM, LocalKVError, SamplingParams

llm = LLM("model.gguf", n_ctx=2048, cache_type_k="q8_0", cache_type_v="q4_0")

completion = llm.complete("Once", max_tokens=8, temperature=0.5, stop=["\n"], seed=3)
text: str = completion.text
reason: str = completion.finish_reason
n_tokens: int = completion.usage.completion_tokens
speed: float = completion.timings.decode_per_second

stream = llm.stream([1, 2], params=SamplingParams(top_k=3), logit_bias={5: -1.0})
for piece in stream:
    print(piece.upper(), stream.stats.n_generated)
stream.close()

answer = llm.chat(
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ],
    tools=[{"type": "function", "function": {"name": "weather"}}],
    template_kwargs={"reasoning_effort": "high"},
    enable_thinking=False,
    reasoning_budget=64,
    prefill="Sure",
    min_p=0.1,
)
print(answer.completion.usage.cached_tokens)

prompt = llm.chat_prompt([{"role": "user", "content": "Hello"}], continued="Well")
print(prompt.text, len(prompt.ids), *prompt.warnings)
llm.complete(prompt, ignore_eos=True)

for one in llm.complete(["Once", "Twice"], max_tokens=2):
    print(one.text)

for token in llm.complete("Once", logprobs=2).logprobs or ():
    print(token.token.upper(), token.bytes.hex(), token.logprob + 1, token.top_logprobs[0].id)
print(stream.token_logprobs)

n_texts, n_embd = llm.embed(["Once", "Twice"]).shape
n_tokens, n_embd = llm.embed("Once", pooling="none", normalize=False)[0].shape

with LLM("model.gguf", progress=False) as closed:
    closed.close()

ids = llm.tokenize("Once")
rows, n_vocab = llm.logits(ids).shape
print(rows + n_vocab, llm.detokenize(ids))

try:
    print(llm.memory.total, llm.warnings, llm.load_seconds, llm.kernels["attention"])
except LocalKVError as error:
    print(error.message, error.hint)
