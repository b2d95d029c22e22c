"""The slash commands: their names, their arguments, and the method of the screen that runs each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from textual.content import Content

from localkv.chat.session import default_name, export, sampling_value
from localkv.errors import UsageError, counted
from localkv.sampling.params import NUMBERS, SAMPLERS, SamplingParams
from localkv.tui.figures import size
from localkv.tui.widgets.side_panel import setting_text

if TYPE_CHECKING:
    from localkv.tui.chat_screen import ChatScreen

ALIASES = {
    **{
        alias.replace("-", "_"): entry.name
        for entry in SAMPLERS
        if entry.name in NUMBERS
        for alias in entry.aliases
    },
    "dynatemp_exp": "dynatemp_exponent",
}
"""llama.cpp's names of settings that are called otherwise here."""

WHY_LOST = "some layers no longer had what they keep of the text before them"
"""Why tokens that were the same as before had to be read again."""

THINK = {"on": True, "off": False, "auto": None}
"""Arguments of /think, and what they ask of the chat template."""
AUDITS = {"auto": True, "off": False}
"""Arguments of /audit, and whether answers are then audited by themselves."""
_FROM_NOW = "from the next answer on, here and in new chats"


@dataclass(frozen=True)
class SlashCommand:
    """One command: its usage, its description, and the function that runs it with its argument."""

    usage: str
    description: str
    run: Callable[[ChatScreen, str], Awaitable[None]]

    @property
    def name(self) -> str:
        return self.usage.split(" ")[0]


async def run_command(screen: ChatScreen, text: str) -> None:
    """Run a line that a user typed.

    Raises:
        LocalKVError: there is no such command, or it can't be done.
    """
    name, _, argument = text.partition(" ")
    for command in COMMANDS:
        if command.name == name:
            await command.run(screen, argument.strip())
            return
    raise UsageError(f"no such command {name}", hint="/help lists them")


def _setting_names() -> list[str]:
    """Settings that are one number."""
    numbers = [f.name for f in fields(SamplingParams) if isinstance(f.default, int | float)]
    return ["seed", "max_tokens", *numbers]


def change_setting(screen: ChatScreen, name: str, text: str) -> None:
    """Give a setting a value. Raises LocalKVError."""
    session = screen.session
    name = name.strip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    if name == "max_tokens":
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"max_tokens: {text!r} is not a whole number") from None
        session.max_tokens = number if number >= 0 else None
        session.save()
    else:
        session.set_param(name, sampling_value(name, text))
    screen.show_settings()


async def _set(screen: ChatScreen, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        rows = [f"{name:<20} {setting_text(screen.session, name)}" for name in _setting_names()]
        await screen.transcript.note("\n".join(rows))
        return
    if not value.strip():
        raise UsageError("give a name and a value", hint="as in /set temperature 0.7")
    change_setting(screen, name, value.strip())
    await screen.transcript.note(f"{name} is {value.strip()}, {_FROM_NOW}")


async def _system(screen: ChatScreen, argument: str) -> None:
    if argument:
        screen.session.system_prompt = "" if argument == "none" else argument
        screen.session.save()
        screen.show_settings()
        screen.count_tokens()
    prompt = screen.session.system_prompt or "none"
    await screen.transcript.note(
        Content.assemble(f"system prompt: {prompt}\n", (_FROM_NOW if argument else "", "$muted"))
    )


async def _think(screen: ChatScreen, argument: str) -> None:
    session, facts = screen.session, screen.meter.facts
    if argument:
        if argument not in THINK:
            raise UsageError(f"/think {argument}: no such choice", hint=f"use {', '.join(THINK)}")
        session.think = THINK[argument]
        session.save()
        screen.count_tokens()
    chosen = next(name for name, value in THINK.items() if value is session.think)
    said = "left to the model" if session.think is None else chosen
    without = ""
    if facts is not None and not facts.has_think_switch and session.think is not None:
        without = f"; {facts.name} has no switch for it, so this changes nothing"
    await screen.transcript.note(f"thinking: {said}, {_FROM_NOW}{without}")


async def _prefill(screen: ChatScreen, argument: str) -> None:
    if argument:
        screen.session.prefill = "" if argument == "none" else argument
        screen.session.save()
        screen.count_tokens()
    text = screen.session.prefill
    said = f"answers begin with: {text}" if text else "answers begin by themselves"
    await screen.transcript.note(
        Content.assemble(f"{said}\n", (_FROM_NOW if argument else "", "$muted"))
    )


async def _clear(screen: ChatScreen, argument: str) -> None:
    await screen.new_chat()


async def _save(screen: ChatScreen, argument: str) -> None:
    if screen.session.id is None:
        raise UsageError("there is nothing to save yet")
    screen.session.rename(argument)
    screen.show_title()
    await screen.transcript.note(f"kept as: {screen.session.title}")


async def _load(screen: ChatScreen, argument: str) -> None:
    if not argument:
        screen.action_sessions()
        return
    found = screen.session.store.sessions(argument)
    if not found:
        raise UsageError(f"no session has {argument!r} in it", hint="Ctrl+O lists them")
    exact = [s for s in found if s.title.lower() == argument.lower()]
    await screen.open_session((exact or found)[0].id)


async def _export(screen: ChatScreen, argument: str) -> None:
    kind = argument if argument in ("md", "json") else "md"
    named = argument if argument and argument != kind else default_name(screen.session.title, kind)
    path = Path(named).expanduser()
    export(screen.session, path)
    await screen.transcript.note(f"written: {path.resolve()}")


async def _stats(screen: ChatScreen, argument: str) -> None:
    state = screen.meter
    if state.facts is None:
        raise UsageError("no model is loaded")
    rows = [("loaded in", f"{state.facts.load_seconds:.1f} s")]
    if state.last is not None:
        last = state.last
        n_evaluated = last.prompt_tokens - last.cached_tokens
        rows += [
            (
                "prompt",
                f"{counted(last.prompt_tokens, 'token')}: {last.cached_tokens:,} reused, "
                f"{n_evaluated:,} evaluated in {last.prompt_seconds:.2f} s",
            ),
            (
                "answer",
                f"{counted(last.completion_tokens, 'token')}, "
                f"{last.decode_per_second:,.1f} tokens/s",
            ),
            ("finished", f"{last.finish_reason}, seed {last.seed}"),
        ]
        if last.degenerate:
            rows.append(("watch", last.degenerate))
        if last.lost_tokens:
            rows.insert(2, ("not reused", f"{counted(last.lost_tokens, 'token')}: {WHY_LOST}"))
        if last.requantised_pages:
            rows.insert(
                -1,
                (
                    "requantised",
                    f"{counted(last.requantised_pages, 'page')} in {last.requantise_seconds:.2f} s",
                ),
            )
        if last.drafted_tokens:
            rows.insert(
                -1,
                (
                    "guesses",
                    f"{last.accepted_tokens:,} of {last.drafted_tokens:,} right "
                    f"({last.accepted_tokens / last.drafted_tokens:.0%}), in "
                    f"{counted(last.verified_batches, 'verification')}",
                ),
            )
    await screen.transcript.note(_rows(rows))


async def _model(screen: ChatScreen, argument: str) -> None:
    if argument:
        screen.load_model(argument)
        return
    screen.choose_model()
    facts = screen.meter.facts
    if facts is None:
        return
    rows = [
        ("model", f"{facts.name}, {facts.architecture}, {size(facts.weight_bytes)}"),
        ("file", screen.session.model),
        ("context", f"{facts.n_ctx:,} tokens, trained for {facts.n_ctx_train:,}"),
        ("cache", ", ".join(facts.kv_ladder) or f"K {facts.type_k}, V {facts.type_v}"),
        ("runs on", f"{facts.backend}, {facts.threads.in_words()}"),
        *(("warning", line) for line in facts.warnings),
    ]
    await screen.transcript.note(_rows(rows))


async def _continue(screen: ChatScreen, argument: str) -> None:
    await screen.continue_answer()


async def _copy(screen: ChatScreen, argument: str) -> None:
    views = [view for view in screen.transcript.views() if view.message.role == "assistant"]
    if not views:
        raise UsageError("there is no answer to copy")
    if argument == "code":
        if not views[-1].code_blocks():
            raise UsageError("the last answer has no code")
        views[-1].action_copy_code()
    else:
        views[-1].action_copy()


async def _audit(screen: ChatScreen, argument: str) -> None:
    if not argument:
        screen.audit_answer()
        return
    if argument not in AUDITS:
        raise UsageError(f"/audit {argument}: no such choice", hint=f"use {', '.join(AUDITS)}")
    screen.audit.automatic = AUDITS[argument]
    when = "when nothing else goes on" if screen.audit.automatic else "by /audit alone"
    await screen.transcript.note(f"answers are audited {when}")


async def _restart(screen: ChatScreen, argument: str) -> None:
    screen.action_restart_engine()


async def _help(screen: ChatScreen, argument: str) -> None:
    screen.action_help()


async def _quit(screen: ChatScreen, argument: str) -> None:
    await screen.app.action_quit()


def _rows(rows: list[tuple[str, str]]) -> Content:
    width = 1 + max(9, *(len(name) for name, _ in rows))
    return Content("\n").join(
        Content.assemble((f"{name:<{width}}", "$muted"), value) for name, value in rows
    )


COMMANDS = (
    SlashCommand("/set NAME VALUE", "a sampling setting; alone, all of them", _set),
    SlashCommand("/system TEXT", "the system prompt; none for none", _system),
    SlashCommand("/think MODE", "reason before an answer: on, off, auto", _think),
    SlashCommand("/prefill TEXT", "how answers begin; none for none", _prefill),
    SlashCommand("/continue", "go on with an answer that was cut", _continue),
    SlashCommand("/clear", "new chat; the old one is kept", _clear),
    SlashCommand("/save TITLE", "give the session a title", _save),
    SlashCommand("/load WORDS", "resume a session; alone, list them", _load),
    SlashCommand("/export FILE", "write .md or .json", _export),
    SlashCommand("/copy", "copy the last answer; /copy code its code", _copy),
    SlashCommand("/audit", "what the packed cache changed; auto, off", _audit),
    SlashCommand("/stats", "figures of the last answer", _stats),
    SlashCommand("/model NAME", "load another model; alone, choose one", _model),
    SlashCommand("/restart", "start the engine again", _restart),
    SlashCommand("/help", "keys and commands", _help),
    SlashCommand("/quit", "leave", _quit),
)
