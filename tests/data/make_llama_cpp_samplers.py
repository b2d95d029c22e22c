"""Writes llama_cpp_samplers.json: what llama.cpp's own samplers leave.

    pip install llama-cpp-python==0.3.36
    python make_llama_cpp_samplers.py ggml-vocab-gpt-2.gguf

The argument is llama.cpp's `models/ggml-vocab-gpt-2.gguf`, a vocabulary without weights, which its
DRY sampler needs to look for sequence breakers. A case of the output:

    logits         [n, step, scale] of `logits`, below
    banned         ids whose logit is -inf
    history        ids accepted before
    n_ctx          what a last_n of -1 stands for
    params         fields of `SamplingParams`
    ids            that are left with a probability above 1e-9, ascending
    probabilities  theirs, of 5 significant digits

a path of tokens that one sampler draws, which corrects itself by them:

    params         fields of `SamplingParams`
    steps          [step, scale, n, token, probabilities]: the logits of `n_vocab` tokens, how many
                   tokens are left, the one that is drawn, and the probabilities of the first eight

and beside the cases a few dozen GPT-2 tokens, renumbered from 0, which are the vocabulary of those
cases that use DRY: `texts`, and how llama.cpp cuts the rests of their sequence breakers, `rests`.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
from pathlib import Path

import llama_cpp.llama_cpp as lib

N_CTX = 24
BREAKERS = ["\n", ":", '"', "*"]
LONG_BREAKERS = ["\n###", "User:", "<|im_end|>", "\n\n", "repeat after"]
TEXT = (
    'User: say "hello, hello" to *the* cat.\n\nAssistant: hello hello, I repeat: hello, hello'
    "\n### repeat after the cat repeat after the cat\nUser: repeat the cat<|im_end|> say hello ##"
)
SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]
SAMPLERS += ["temperature"]


def logits(n: int, step: int, scale: int) -> list[float]:
    """Multiples of 1/256, exact in float32; all differ where n < 4099, a prime."""
    return [((i + 1) * step % 4099 - 2049) * scale / 256 for i in range(n)]


class Vocabulary:
    """The tokens of `TEXT` and of the rests of the breakers, renumbered."""

    def __init__(self, path: Path) -> None:
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self.model = lib.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = lib.llama_model_get_vocab(self.model)
        rests = {b[i:] for b in LONG_BREAKERS for i in range(1, len(b))}
        cut = {rest: self.tokenize(rest) for rest in sorted(rests)}
        self.ids = sorted({*self.tokenize(TEXT), *(id for ids in cut.values() for id in ids)})
        self.rests = {rest: [self.ids.index(id) for id in ids] for rest, ids in cut.items()}
        self.text = [self.ids.index(id) for id in self.tokenize(TEXT)]

    def tokenize(self, text: str) -> list[int]:
        out = (lib.llama_token * 200)()
        n = lib.llama_tokenize(
            self.vocab, text.encode(), len(text.encode()), out, len(out), False, False
        )
        return list(out[:n])

    def texts(self) -> list[str]:
        buffer = ctypes.create_string_buffer(200)
        texts = []
        for id in self.ids:
            n = lib.llama_token_to_piece(self.vocab, id, buffer, len(buffer), 0, True)
            texts.append(buffer.raw[:n].decode())
        return texts


def sampler(name: str, p: dict, n_ctx: int, vocabulary: Vocabulary) -> lib.llama_sampler_p:
    """The sampler that llama.cpp's `common_sampler_init` makes; `p` has all of its settings."""
    min_keep = p["min_keep"]
    match name:
        case "penalties":
            return lib.llama_sampler_init_penalties(
                10**6,
                n_ctx if p["repeat_last_n"] == -1 else p["repeat_last_n"],
                p["repeat_penalty"],
                p["frequency_penalty"],
                p["presence_penalty"],
            )
        case "dry":
            breakers = [text.encode() for text in p["dry_sequence_breakers"]]
            return lib.llama_sampler_init_dry(
                vocabulary.vocab,
                p["dry_multiplier"],
                p["dry_base"],
                p["dry_allowed_length"],
                n_ctx if p["dry_penalty_last_n"] == -1 else p["dry_penalty_last_n"],
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        case "top_n_sigma":
            return lib.llama_sampler_init_top_n_sigma(p["top_n_sigma"])
        case "top_k":
            return lib.llama_sampler_init_top_k(p["top_k"])
        case "typ_p":
            return lib.llama_sampler_init_typical(p["typ_p"], min_keep)
        case "top_p":
            return lib.llama_sampler_init_top_p(p["top_p"], min_keep)
        case "min_p":
            return lib.llama_sampler_init_min_p(p["min_p"], min_keep)
        case "xtc":
            return lib.llama_sampler_init_xtc(p["xtc_probability"], p["xtc_threshold"], min_keep, 1)
        case "temperature":
            return lib.llama_sampler_init_temp_ext(
                p["temperature"], p["dynatemp_range"], p["dynatemp_exponent"]
            )
    raise ValueError(name)


DEFAULTS: dict = {
    "temperature": 0.8,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typ_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "min_keep": 0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": BREAKERS,
}


def run(case: dict, vocabulary: Vocabulary) -> dict:
    """Adds to a case what llama.cpp makes of it."""
    params = DEFAULTS | case["params"]
    values = logits(*case["logits"])
    for id in case.get("banned", []):
        values[id] = -math.inf
    uses_dry = params["dry_multiplier"] != 0
    real = vocabulary.ids if uses_dry else list(range(len(values)))
    data = (lib.llama_token_data * len(values))(
        *(lib.llama_token_data(id, x, 0) for id, x in zip(real, values, strict=True))
    )
    left = lib.llama_token_data_array(data, len(values), -1, False)
    chain = [
        sampler(name, params, case.get("n_ctx", N_CTX), vocabulary) for name in params["samplers"]
    ]
    for one in [*chain, lib.llama_sampler_init_dist(1)]:
        for id in case.get("history", []):
            lib.llama_sampler_accept(one, real[id])
        lib.llama_sampler_apply(one, ctypes.byref(left))
        lib.llama_sampler_free(one)
    found = sorted((real.index(x.id), x.p) for x in left.data[: left.size] if x.p > 1e-9)
    return case | {
        "ids": [id for id, _ in found],
        "probabilities": [float(f"{p:.5g}") for _, p in found],
    }


def cases(vocabulary: Vocabulary) -> list[dict]:
    """One sampler at a time over its settings, orders that matter, then chains at random."""
    out: list[dict] = []

    def add(
        samplers: list[str], n: int, step: int = 1234, scale: int = 1, *, more: dict, **p: object
    ) -> None:
        out.append({"logits": [n, step, scale], "params": {"samplers": samplers, **p}, **more})

    none: dict = {}
    for k in (-1, 0, 1, 40, 5000):
        add(["top_k"], 40, more=none, top_k=k)
    for k in (1, 2, 40, 128, 129):
        add(["top_k"], 3000, more=none, top_k=k)
    for min_keep in (0, 1, 7, 50):
        for p in (0.0, 0.1, 0.5, 0.95, 1.0):
            add(["top_p"], 30, more=none, top_p=p, min_keep=min_keep)
            add(["typ_p"], 30, more=none, typ_p=p, min_keep=min_keep)
            add(["min_p"], 30, more=none, min_p=p, min_keep=min_keep)
    for p in (0.3, 0.8, 0.99):
        add(["top_p"], 3000, 2999, 2, more=none, top_p=p)
        add(["typ_p"], 3000, 2999, 2, more=none, typ_p=p)
        add(["min_p"], 3000, 2999, 2, more=none, min_p=1 - p)
    for n in (-1.0, 0.0, 0.5, 1.0, 1.6, 5.0):
        add(["top_n_sigma"], 30, more={"banned": [3, 4, 29]}, top_n_sigma=n)
    for threshold in (0.01, 0.05, 0.2, 0.4, 0.5, 0.6):
        for min_keep in (0, 3, 18):
            settings = {"xtc_probability": 1.0, "xtc_threshold": threshold, "min_keep": min_keep}
            add(["xtc"], 20, more=none, **settings)
    for temperature in (-1.0, 0.0, 0.2, 1.0, 2.5):
        for dynatemp_range in (0.0, 0.5):
            for exponent in (0.5, 1.0, 2.0):
                settings = {"dynatemp_range": dynatemp_range, "dynatemp_exponent": exponent}
                add(["temperature"], 16, more=none, temperature=temperature, **settings)
    for order in (["top_n_sigma", "temperature"], ["temperature", "min_p"], ["min_p", "top_k"]):
        settings = {"top_n_sigma": 1.0, "dynatemp_range": 0.4, "min_p": 0.2, "top_k": 5}
        add(order, 60, more={"banned": [7]}, **settings)
    add([], 20, more={"banned": [0]})
    add(["top_k"], 1, more=none)

    draw = random.Random(20)
    for last_n in (-1, 0, 1, 5, 64):
        for repeat, frequency, presence in ((1.3, 0, 0), (0.8, 0.1, 0), (1, 0.5, -0.4), (1, 0, 0)):
            add(
                ["penalties"],
                16,
                more={"history": draw.choices(range(16), k=30)},
                repeat_last_n=last_n,
                repeat_penalty=repeat,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )

    n = len(vocabulary.ids)
    words = [i for i in range(n) if i not in vocabulary.text[:1]]
    for allowed_length in (0, 1, 2, 3):
        for last_n in (-1, 11, 200):
            for breakers in ([], BREAKERS, LONG_BREAKERS, [*LONG_BREAKERS, ":"]):
                end = draw.randrange(12, len(vocabulary.text) + 1)
                pool = draw.sample(words, 3)
                histories = (vocabulary.text[:end], draw.choices(pool, k=draw.randrange(30)))
                add(
                    ["dry"],
                    n,
                    more={"history": histories[draw.randrange(2)], "n_ctx": draw.choice([24, 100])},
                    dry_multiplier=draw.choice([0.4, 0.8, 2.0]),
                    dry_base=draw.choice([1.0, 1.2, 1.75]),
                    dry_allowed_length=allowed_length,
                    dry_penalty_last_n=last_n,
                    dry_sequence_breakers=breakers,
                )
    for breakers in ([], LONG_BREAKERS):
        for end in range(8, len(vocabulary.text) + 1, 5):
            history = (vocabulary.text * 2)[end:] + vocabulary.text[:end]
            more = {"history": history, "n_ctx": 500}
            add(["dry"], n, more=more, dry_multiplier=0.3, dry_sequence_breakers=breakers)

    for _ in range(110):
        chain = draw.sample(SAMPLERS, k=draw.randrange(2, 10))
        if {"top_n_sigma", "typ_p"} <= {*chain}:
            chain.remove("typ_p")  # of tokens that top_n_sigma masked, llama.cpp's entropy is NaN
        settings = {
            "temperature": round(draw.uniform(0.2, 1.8), 2),
            "dynatemp_range": draw.choice([0.0, 0.3]),
            "top_k": draw.choice([3, 10, 25]),
            "typ_p": round(draw.uniform(0.2, 1), 2),
            "top_p": round(draw.uniform(0.5, 1), 2),
            "min_p": round(draw.uniform(0.0, 0.2), 2),
            "top_n_sigma": round(draw.uniform(0.3, 3), 2),
            "xtc_probability": draw.choice([0.0, 1.0]),
            "xtc_threshold": round(draw.uniform(0.05, 0.4), 2),
            "min_keep": draw.choice([0, 0, 2, 5]),
            "repeat_penalty": 1.2,
            "repeat_last_n": 10,
            "dry_multiplier": 0.6 if "dry" in chain else 0.0,
        }
        names = {
            "repeat_penalty": "penalties",
            "repeat_last_n": "penalties",
            "dry_multiplier": "dry",
            "dynatemp_range": "temperature",
            "xtc_probability": "xtc",
            "xtc_threshold": "xtc",
        }
        used = {k: v for k, v in settings.items() if names.get(k, k) in [*chain, "min_keep"]}
        more = {"history": draw.choices(draw.sample(words, 4), k=20)}
        add(chain, n, draw.randrange(2, 4098), draw.choice([1, 2]), more=more, **used)
    return out


def path(params: dict, n_vocab: int, seed: int) -> dict:
    """What one sampler draws in 40 steps, and among which tokens."""
    p = DEFAULTS | params
    if "adaptive_target" in p:
        init = lib._lib.llama_sampler_init_adaptive_p
        init.argtypes = [ctypes.c_float, ctypes.c_float, ctypes.c_uint32]
        init.restype = lib.llama_sampler_p_ctypes
        last = init(p["adaptive_target"], p["adaptive_decay"], seed)
        chain = [lib.llama_sampler_init_min_p(p["min_p"], 0), last]
    else:
        tau, eta = p["mirostat_tau"], p["mirostat_eta"]
        last = (
            lib.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, 100)
            if p["mirostat"] == 1
            else lib.llama_sampler_init_mirostat_v2(seed, tau, eta)
        )
        chain = [lib.llama_sampler_init_temp(p["temperature"]), last]
    draw, steps = random.Random(seed), []
    for _ in range(40):
        step, scale = draw.randrange(2, 4098), draw.choice([1, 1, 2])
        values = logits(n_vocab, step, scale)
        data = (lib.llama_token_data * n_vocab)(
            *(lib.llama_token_data(id, x, 0) for id, x in enumerate(values))
        )
        left = lib.llama_token_data_array(data, n_vocab, -1, False)
        for one in chain:
            lib.llama_sampler_apply(one, ctypes.byref(left))
        token = left.data[left.selected].id
        lib.llama_sampler_accept(last, token)
        found = sorted((x.id, x.p) for x in left.data[: left.size])
        shown = [[id, float(f"{p:.5g}")] for id, p in found[:8]]
        steps.append([step, scale, left.size, token, shown])
    return {"params": params, "n_vocab": n_vocab, "steps": steps}


def paths() -> list[dict]:
    """The paths of mirostat 1 on which k stays below 2^31: llama.cpp converts a larger one to 1."""
    miro = [
        {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta, "temperature": temp}
        for version in (1, 2)
        for tau, eta, temp in ((5.0, 0.1, 0.8), (2.0, 0.5, 1.0), (0.5, 1.0, 1.3), (4.0, 0.1, 0.5))
    ]
    adaptive = [
        {"adaptive_target": target, "adaptive_decay": decay, "min_p": min_p}
        for target, decay, min_p in ((0.5, 0.9, 0.05), (0.2, 0.5, 0.01), (0.0, 0.0, 0.1))
    ]
    adaptive.append({"adaptive_target": 0.9, "adaptive_decay": 0.99, "min_p": 0.02})
    return [path(p, 1500, 7 + i) for i, p in enumerate([*miro, *adaptive])]


def main(vocabulary_path: str) -> None:
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    vocabulary = Vocabulary(Path(vocabulary_path))
    found = [run(case, vocabulary) for case in cases(vocabulary)]
    texts, rests = json.dumps(vocabulary.texts()), json.dumps(vocabulary.rests)
    lines, ways = (
        ",\n".join(json.dumps(one, separators=(",", ":")) for one in many)
        for many in (found, paths())
    )
    Path(__file__).with_name("llama_cpp_samplers.json").write_text(
        f'{{"texts":{texts},\n"rests":{rests},\n"cases":[\n{lines}\n],\n"paths":[\n{ways}\n]}}\n'
    )


if __name__ == "__main__":
    main(sys.argv[1])
