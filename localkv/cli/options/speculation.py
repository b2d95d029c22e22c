"""The options of speculative decoding: llama.cpp's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from localkv.cli.options import option
from localkv.cli.parsing.option_types import Choice, Whole
from localkv.config import CacheConfig
from localkv.engine.speculation.config import DRAFTERS, MOST_DRAFTED, Speculation, check_drafter
from localkv.formats import KV_FORMATS


def speculation_options() -> list[click.Parameter]:
    """How tokens are guessed."""
    return [
        option(
            "spec",
            "--spec-type",
            "--spec",
            panel="Speed",
            type=Choice(DRAFTERS),
            help="Guess tokens and evaluate several at once; the text stays the same. ngram: go on "
            "as the text did where its last tokens came up before. draft: as -md's model says. "
            "[default: draft with -md, else none]",
        ),
        *draft_model_options(),
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
        option(
            "draft_p_min",
            "--spec-draft-p-min",
            "--draft-p-min",
            panel="Speed",
            llama_env="SPEC_DRAFT_P_MIN",
            type=click.FloatRange(0, 1),
            default=Speculation.draft_p_min,
            show_default=True,
            metavar="P",
            help="Guess no token that the draft model finds less probable.",
        ),
    ]


def draft_model_options() -> list[click.Parameter]:
    """A model that drafts, and its cache."""

    def types(side: str) -> click.Parameter:
        return option(
            f"cache_type_{side}_draft",
            f"-ct{side}d",
            f"--spec-draft-type-{side}",
            f"--cache-type-{side}-draft",
            panel="Speed",
            llama_env=f"SPEC_DRAFT_CACHE_TYPE_{side.upper()}",
            type=Choice(tuple(KV_FORMATS), case_sensitive=False),
            default=CacheConfig.type_k if side == "k" else CacheConfig.type_v,
            show_default=True,
            metavar="TYPE",
            help=f"The type of {side.upper()} in the cache of the draft model.",
        )

    return [
        option(
            "draft_model",
            "-md",
            "--spec-draft-model",
            "--model-draft",
            panel="Speed",
            llama_env="SPEC_DRAFT_MODEL",
            metavar="FILE",
            help="A small model with the same tokens, which guesses how the text goes on.",
        ),
        types("k"),
        types("v"),
    ]


_SPECULATION = ("spec", "draft_model", "draft_max", "draft_min", "draft_p_min")
_DRAFT_TYPES = ("cache_type_k_draft", "cache_type_v_draft")


def speculation_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the values stand for; none for a command without the options.

    Raises:
        UsageError: there is no model that drafts, or it is not used.
        ModelFileError: its file can't be read.
    """
    if "spec" not in values:
        return {}
    file, spec = values["draft_model"], values["spec"]
    if spec is not None or file is not None:
        check_drafter(Speculation(spec or "draft"), file)
    if file is not None and not os.path.isfile(file):
        from localkv.loader.gguf_file import open_gguf

        open_gguf(file)  # says what is wrong before anything heavy is imported
    types = {name: values[name] for name in _DRAFT_TYPES} if file is not None else {}
    return {**{name: values[name] for name in _SPECULATION}, **types}
