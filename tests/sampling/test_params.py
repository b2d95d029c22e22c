"""Names of samplers, and the ranges of their settings."""

from __future__ import annotations

import numpy as np
import pytest

from localkv.errors import UsageError
from localkv.sampling.params import (
    SAMPLER_ORDER,
    SamplingParams,
    parse_sampler_sequence,
    parse_samplers,
)

INF = float("inf")


def test_chains_are_parsed() -> None:
    assert parse_samplers("top_k;temperature") == ("top_k", "temperature")
    assert parse_samplers(" nucleus ; top-k;typical;min-p;temp;") == (
        "top_p",
        "top_k",
        "typ_p",
        "min_p",
        "temperature",
    )
    assert parse_samplers("") == ()
    assert parse_samplers(";".join(SAMPLER_ORDER)) == SAMPLER_ORDER
    assert parse_sampler_sequence("edskypmxt") == (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )
    assert parse_sampler_sequence("tk") == ("temperature", "top_k")


def test_unknown_samplers_are_named() -> None:
    with pytest.raises(UsageError, match="unknown sampler 'mirostat'") as error:
        parse_samplers("top_k;mirostat")
    assert all(name in str(error.value.hint) for name in SAMPLER_ORDER)
    with pytest.raises(UsageError, match="unknown sampler 'z' in 'kz'") as error:
        parse_sampler_sequence("kz")
    assert "k top_k" in str(error.value.hint)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, not -0.1"),
        ({"typ_p": float("nan")}, "typ_p must be from 0 to 1, not nan"),
        ({"xtc_probability": 2}, "xtc_probability must be from 0 to 1, not 2"),
        ({"xtc_threshold": -1}, "xtc_threshold must be from 0 to 1, not -1"),
        ({"temperature": INF}, "temperature must be from -1e+30 to 1e+30, not inf"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be from -1e+30 to 1e+30"),
        ({"repeat_penalty": 0.0}, "repeat_penalty must be from 1e-06 to 1e+06, not 0.0"),
        ({"dry_base": 0.9}, "dry_base must be from 1 to 1e+30, not 0.9"),
        ({"dynatemp_exponent": -1.0}, "dynatemp_exponent must be from 0 to 1e+30, not -1.0"),
        ({"min_keep": -1}, "min_keep must be from 0 to 4096, not -1"),
        ({"dry_allowed_length": -1}, "dry_allowed_length must be from 0 to 2147483647"),
        ({"repeat_last_n": -2}, "repeat_last_n must be from -1 to 2147483647, not -2"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n must be from -1 to 2147483647"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"seed": -2}, "seed must be from -1 to 9223372036854775807, not -2"),
        ({"logit_bias": {3: INF}}, "logit_bias of token 3 must be from -1e+30 to 1e+30"),
        ({"logit_bias": {3: float("nan")}}, "must be from -1e+30 to 1e+30, not nan"),
        ({"logit_bias": {3: 1e308}}, "must be from -1e+30 to 1e+30, not 1e+308"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias has '3' where a token id should be"),
        ({"dry_sequence_breakers": "\n"}, "must be a tuple of strings"),
        ({"samplers": ("mirostat",)}, "unknown sampler 'mirostat'"),
        ({"samplers": ("top_k", "xtc", "top_k")}, "samplers has top_k more than once"),
        ({"dry_sequence_breakers": ("a",) * 33}, "must be up to 32 texts, not 33"),
        ({"dry_sequence_breakers": ("a" * 129,)}, "may have 128 characters, not 129"),
        ({"temperature": 5e-324}, "temperature must be at least 1e-30, not 5e-324"),
        ({"temperature": 1e308}, "temperature must be from -1e+30 to 1e+30, not 1e+308"),
        ({"seed": 2**64}, "seed must be from -1 to 9223372036854775807, not 18446744073709551616"),
        ({"top_k": 10**5000}, "top_k must be from -2147483648 to 2147483647, not an integer of"),
        ({"repeat_penalty": 1e308}, "repeat_penalty must be from 1e-06 to 1e+06, not 1e+308"),
    ],
)
def test_what_no_sampler_can_work_with_is_refused(params: dict, message: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**params)
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_what_llama_cpp_takes_is_taken() -> None:
    SamplingParams(top_k=-1, top_p=0, min_p=1, typ_p=0.0, temperature=-1, top_n_sigma=-1.0)
    SamplingParams(repeat_penalty=0.5, frequency_penalty=-2, presence_penalty=2, seed=2**40)
    SamplingParams(dynatemp_range=-1, dry_multiplier=-1.0, repeat_last_n=0, logit_bias={0: -INF})
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), samplers=())
