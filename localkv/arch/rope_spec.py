"""How positions rotate the channels of q and k."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, as `<arch>.rope.*` of a GGUF file describes it.

    Attributes:
        n_dims: leading channels of a head that are rotated; the others pass through.
        theta: base of the frequencies, `theta ** (-2 i / n_dims)`.
        interleaved: channel pairs are (2i, 2i+1), ggml's NORM; otherwise (i, i + n_dims / 2),
            ggml's NEOX.
        divisors: the tensor that divides the frequencies (`rope_freqs.weight` of Llama 3.1), or
            empty.
        long_divisors: the tensor that does so in a context of more tokens than
            `original_context_length` (LongRoPE, Ding et al. 2024), or empty.
        scaling: "none", "linear" or "yarn".
        factor: how many times the original context the scaled one is.
        original_context_length: context length before scaling (YaRN's correction range).
        magnitude: factor on cos and sin; 1 except with YaRN (llama.cpp: `rope_attn_factor` times
            YaRN's mscale).
        yarn_ext_factor, yarn_beta_fast, yarn_beta_slow: YaRN's ramp (Peng et al. 2023,
            section 3.2).
    """

    n_dims: int
    theta: float = 10000.0
    interleaved: bool = True
    divisors: str = ""
    long_divisors: str = ""
    scaling: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    magnitude: float = 1.0
    yarn_ext_factor: float = 0.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    def divisors_in(self, n_ctx: int) -> str:
        """The tensor that divides the frequencies in a context of `n_ctx` tokens, or empty.

        It is chosen once for a context, so that all keys of a cache are rotated alike.
        """
        if self.long_divisors and n_ctx > self.original_context_length:
            return self.long_divisors
        return self.divisors
