"""The options that say where a generation ends: llama.cpp's names and defaults."""

from __future__ import annotations

import click

from localkv.cli.options import flag, option
from localkv.cli.parsing.option_types import Whole


def length_options() -> list[click.Parameter]:
    """The options that say where a generation ends."""
    return [
        option(
            "n_predict",
            "-n",
            "--predict",
            "--n-predict",
            panel="Length",
            llama_env="N_PREDICT",
            type=Whole(-2),
            default=-1,
            show_default=True,
            metavar="N",
            help="Most tokens to generate; -1 and -2 go on to the end of the context.",
        ),
        option(
            "stop",
            "-r",
            "--reverse-prompt",
            "--stop",
            panel="Length",
            multiple=True,
            metavar="TEXT",
            help="End before this text; may be given again.",
        ),
        flag("--ignore-eos", panel="Length", help="Never draw a token that ends the generation."),
    ]
