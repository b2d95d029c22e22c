"""Completion of command lines in shells: bash, zsh and fish.

click finds out what may come next. This file has the values that only localkv knows, and a kind of
value that click does not know (`gguf`: model files, and folders on the way to them). It also has
the function for bash: click's own takes words that bash has cut at every colon and equals sign. So
that one completes neither `org/repo:Q8_0` nor `--device=cpu`.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

VARIABLE = "_LOCALKV_COMPLETE"

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}" files="" models="" kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            plain) COMPREPLY+=("$value") ;;
            file) files=yes ;;
            gguf) models=yes ;;
        esac
    done < <(env COMP_LINE="$line" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
    value=${COMP_WORDS[COMP_CWORD]}
    [[ $value == [=:] ]] && value=""
    if [[ $models ]]; then
        COMPREPLY+=($(compgen -f -X '!*.[gG][gG][uU][fF]' -- "$value"; compgen -d -- "$value"))
        compopt -o filenames
    elif [[ $files ]]; then
        compopt -o default
    fi
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Takes the typed line, and returns the text that bash will put after its last cut."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)[1:]
        ends_word = not words or line[-1:].isspace()
        incomplete = "" if ends_word else words.pop()
        kept = max(incomplete.rfind(c) for c in ":=") + 1
        breaks = os.environ.get("COMP_WORDBREAKS", "")
        self.kept = incomplete[:kept] if kept and incomplete[kept - 1] in breaks else ""
        return words, incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type},{item.value.removeprefix(self.kept)}"


class Zsh(ZshComplete):
    """click's, with model files."""

    source_template = ZshComplete.source_template.replace(
        'elif [[ "$type" == "file" ]]; then',
        """elif [[ "$type" == "gguf" ]]; then
            _path_files -g "*.(gguf|GGUF)"
            _path_files -/
        elif [[ "$type" == "file" ]]; then""",
    )


class Fish(FishComplete):
    """click's, with model files."""

    source_template = FishComplete.source_template.replace(
        'else if test $metadata[1] = "file";',
        """else if test $metadata[1] = "gguf";
            __fish_complete_path $metadata[2] | string match -ri '.*(?:/|\\.gguf)(?:\\t.*)?$';
        else if test $metadata[1] = "file";""",
    )


def answer_shell(cli: click.Command, instruction: str) -> int:
    """Answer a shell with its function or the possible next words; returns the exit code.

    A failure is silent, since a line that is being typed is no place for a message.
    """
    for shell in (Bash, Zsh, Fish):
        add_completion_class(shell)
    try:
        return shell_complete(cli, {}, "localkv", VARIABLE, instruction)
    except Exception:
        if os.environ.get("LOCALKV_DEBUG", "0") not in ("", "0"):
            raise
        return 1


def file_values(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Files, which the shell lists itself."""
    return [CompletionItem(incomplete, type="file")]


def cached_values(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Models in Hugging Face's cache, by name."""
    from localkv.loader.hub.cache import cached_models

    try:
        names = [item.name for item in cached_models()]
    except OSError:
        return []
    # A shell reads line by line, and a name that can't be printed can't be typed either.
    names = [name for name in names if name.isprintable()]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def model_values(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Values of -m: models in the cache, model files, and folders."""
    return [*cached_values(ctx, param, incomplete), CompletionItem(incomplete, type="gguf")]
