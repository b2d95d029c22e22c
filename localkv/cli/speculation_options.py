"""The options of speculative decoding: llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from localkv.cli.option_types import Whole
from localkv.cli.options import option
from localkv.engine.speculation.config import DRAFTERS, MOST_DRAFTED, Speculation


def speculation_options() -> list[click.Parameter]:
    """How tokens are guessed."""
    return [
        option(
            "spec",
            "--spec-type",
            "--spec",
            panel="Speed",
            type=click.Choice(DRAFTERS),
            default="none",
            show_default=True,
            help="Guess tokens and evaluate several at once; the text stays the same. ngram: go on "
            "as the text did where its last tokens came up before.",
        ),
        option(
            "draft_max",
            "--spec-draft-n-max",
            "--draft-max",
            "--draft",
            panel="Speed",
            llama_env="SPEC_DRAFT_N_MAX",
            type=Whole(1, MOST_DRAFTED),
            default=Speculation.draft_max,
            show_default=True,
            metavar="N",
            help="Most tokens guessed at a time; how many are worth it is measured.",
        ),
        option(
            "draft_min",
            "--spec-draft-n-min",
            "--draft-min",
            panel="Speed",
            llama_env="SPEC_DRAFT_N_MIN",
            type=Whole(1, MOST_DRAFTED),
            default=Speculation.draft_min,
            show_default=True,
            metavar="N",
            help="Guess nothing where fewer tokens than this are worth it.",
        ),
    ]


def speculation_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the values stand for; none for a command without the options."""
    return {name: values[name] for name in ("spec", "draft_max", "draft_min") if name in values}
