"""Options of `localkv complete`: where the prompt comes from, and where the text goes."""

from __future__ import annotations

import click

from localkv.cli.complete.prompt import STDIN
from localkv.cli.options import (
    escape_option,
    flag,
    json_option,
    option,
    quiet_option,
    raw_option,
)
from localkv.cli.options.chat import chat_options, system_options, template_options
from localkv.cli.parsing.option_types import Choice, Whole

PROMPT_OPTIONS: list[click.Parameter] = [
    option(
        "-p",
        "--prompt",
        panel="Prompt",
        metavar="TEXT",
        help=f"The text to continue; {STDIN} in it is the place of the text on stdin, which is "
        "not read otherwise.",
    ),
    option(
        "-f",
        "--file",
        panel="Prompt",
        metavar="FILE",
        help="Read the prompt from a UTF-8 file, unchanged except for one final line break; - is "
        "stdin, which -p may follow, after an empty line.",
    ),
    escape_option(
        "Prompt", "-p, -sys, --prefill, -r and --dry-sequence-breaker; never in files and stdin"
    ),
    flag(
        "--parse-special",
        panel="Prompt",
        help="Read control tokens written in the prompt, such as <|im_start|>, as control tokens.",
    ),
    flag("--chat", panel="Prompt", help="Answer the prompt through the model's chat template."),
    *system_options("Prompt", "prompt", "; implies --chat"),
    *template_options("Prompt", implied="; implies --chat"),
    *chat_options("Prompt", implied="; implies --chat"),
]

OUTPUT_OPTIONS: list[click.Parameter] = [
    option(
        "-o",
        "--output",
        panel="Output",
        metavar="FILE",
        help="Write to this file instead of stdout, while the text is generated.",
    ),
    json_option(),
    option(
        "--logprobs",
        panel="Output",
        type=Whole(0),
        metavar="N",
        help="With --json, say how probable each token was, and the N most probable ones: natural "
        "logarithms of the model's own probabilities, before all samplers.",
    ),
    option(
        "--audit",
        panel="Output",
        type=Choice(["kept", "exact"]),
        is_flag=False,
        flag_value="kept",
        metavar="[exact]",
        help="Evaluate the text once more through an f16 cache, and say on stderr what the packed "
        "cache changed: divergence, and the tokens with another most likely choice. With exact the "
        "divergence leaves nothing out, and it takes twice as long.",
    ),
    option(
        "--stream/--no-stream",
        panel="Output",
        type=bool,
        default=True,
        help="Print the text while it is generated, or once it is complete.  [default: stream]",
    ),
    raw_option(),
    flag("--stats", panel="Output", help="Print speed and sizes on stderr at the end."),
    flag(
        "-v",
        "--verbose",
        panel="Output",
        help="Describe on stderr the model, and the kernels that run it.",
    ),
    quiet_option("Leave out the lines on stderr about memory and about the flags of --preset."),
]
