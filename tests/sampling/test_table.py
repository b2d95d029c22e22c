"""Every sampler of the table is taken by the command line, the chat and Python, and runs."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from localkv.commands.complete import complete
from localkv.commands.generation_options import sampling_options, sampling_params
from localkv.errors import UsageError
from localkv.kernels.gpu.device_draw import ON_DEVICE, device_draw
from localkv.sampling import samplers
from localkv.sampling.params import (
    SAMPLERS,
    SamplerEntry,
    SamplingParams,
    active_samplers,
    parse_sampler_sequence,
    parse_samplers,
)
from localkv.sampling.sampler import Sampler
from localkv.tui.slash_commands import ALIASES
from support.program import Program

ACTIVE = {
    "penalties": {"repeat_penalty": 2.0},
    "dry": {"dry_multiplier": 1.0},
    "top_n_sigma": {"top_n_sigma": 0.5},
    "top_k": {"top_k": 2},
    "typ_p": {"typ_p": 0.2},
    "top_p": {"top_p": 0.2},
    "min_p": {"min_p": 0.9},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "temperature": {"temperature": 2.0},
    "adaptive_p": {"adaptive_target": 0.1},
    "mirostat": {"mirostat": 2, "mirostat_tau": 0.5, "temperature": 1.0},
}
"""Settings with which a sampler changes something, and no other one does."""

IN_CHAINS = [entry for entry in SAMPLERS if entry.letter]
"""Samplers that a chain can name; the others run in place of it."""

every_sampler = pytest.mark.parametrize("entry", SAMPLERS, ids=lambda entry: entry.name)
in_chains = pytest.mark.parametrize("entry", IN_CHAINS, ids=lambda entry: entry.name)


def alone(entry: SamplerEntry, **more: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "samplers": chain(entry), **ACTIVE[entry.name], **more})


def chain(entry: SamplerEntry) -> tuple[str, ...]:
    return (entry.name,) if entry.letter else ()


def test_names_letters_and_aliases_are_each_one_samplers() -> None:
    names = [name for entry in SAMPLERS for name in (entry.name, *entry.aliases)]
    letters = [entry.letter for entry in IN_CHAINS]
    assert len(set(names)) == len(names)
    assert len(set(letters)) == len(letters)
    assert all(len(letter) == 1 for letter in letters)


@in_chains
def test_the_command_line_takes_every_name_and_letter(entry: SamplerEntry) -> None:
    for name in (entry.name, *entry.aliases):
        assert parse_samplers(name) == (entry.name,)
    assert parse_sampler_sequence(entry.letter) == (entry.name,)
    values = complete.make_context("complete", ["--samplers", entry.name, "-m", "x"]).params
    assert sampling_params(values, escape=True).samplers == (entry.name,)


def test_the_help_lists_every_sampler(program: Program) -> None:
    shown = "".join(program("complete", "--help-all").out.split())
    assert ";".join(entry.name for entry in IN_CHAINS) in shown
    assert "".join(entry.letter for entry in IN_CHAINS) in shown


def test_refusals_list_every_sampler() -> None:
    for refused in (
        lambda: SamplingParams(samplers=("none",)),
        lambda: parse_samplers("none"),
        lambda: parse_sampler_sequence("?"),
    ):
        with pytest.raises(UsageError) as error:
            refused()
        assert all(entry.name in str(error.value.hint) for entry in IN_CHAINS)


@every_sampler
def test_an_alias_that_names_a_setting_is_one_in_the_chat(entry: SamplerEntry) -> None:
    for alias in entry.aliases if hasattr(SamplingParams(), entry.name) else ():
        assert hasattr(SamplingParams(), ALIASES[alias.replace("-", "_")])


def test_every_number_that_a_sampler_reads_is_an_option() -> None:
    numbers = {f.name for f in fields(SamplingParams) if isinstance(f.default, int | float)}
    assert numbers - {"min_keep"} <= {option.name for option in sampling_options()}


@every_sampler
def test_it_runs_where_it_acts_and_only_there(entry: SamplerEntry) -> None:
    params = alone(entry)
    assert active_samplers(params) == (entry,)
    assert active_samplers(SamplingParams(samplers=chain(entry), **off(entry))) == ()

    logits = np.array([2.0, 1.9, 1.0, 0.5, 0.0], np.float32)
    sampler, untouched = (
        Sampler(one, n_vocab=5) for one in (params, SamplingParams(seed=1, samplers=()))
    )
    for token in [0, 1, 2, 0, 1]:
        sampler.accept(token)
    ids, probabilities = sampler.candidates(logits)
    all_ids, all_probabilities = untouched.candidates(logits)
    changed = len(ids) < len(all_ids) or not np.allclose(probabilities, all_probabilities)
    assert changed, f"{entry.name} changed nothing"


def off(entry: SamplerEntry) -> dict[str, object]:
    """The settings that turn it off: a chain in which nothing acts has them."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    return {name: neutral[name] for name in ACTIVE[entry.name] if name in neutral}


@every_sampler
def test_a_greedy_draw_leaves_out_only_what_keeps_the_largest(entry: SamplerEntry) -> None:
    params = alone(entry)
    logits = np.array([2.0, 2.0 - 1e-3, 1.0, 0.5, 0.0], np.float32)
    sampler = Sampler(params, n_vocab=5)
    for token in [0, 1, 2, 0, 1, 2]:
        sampler.accept(token)
    ids, probabilities = sampler.candidates(logits)
    keeps = int(ids[probabilities.argmax()]) == 0
    assert keeps or not entry.keeps_largest


@every_sampler
def test_what_runs_on_the_device_draws_as_the_host_does(entry: SamplerEntry) -> None:
    draw = device_draw(alone(entry))
    assert (draw is not None) == (entry.name in ON_DEVICE)
    if draw is None:
        return
    logits = torch.tensor([[2.0, 1.9, 1.0, 0.5, 0.0]])
    possible, _ = Sampler(alone(entry), n_vocab=5).candidates(logits[0].numpy())
    drawn = {int(draw(logits, torch.tensor([1, number]))) for number in range(60)}
    assert drawn == set(possible.tolist())


def test_every_function_has_an_entry() -> None:
    functions = {
        name
        for name, value in vars(samplers).items()
        if name[0] != "_"
        and callable(value)
        and getattr(value, "__module__", "") == samplers.__name__
    }
    assert functions - {"logit_bias"} <= {entry.name for entry in SAMPLERS}
    assert ON_DEVICE.keys() <= {entry.name for entry in SAMPLERS}
