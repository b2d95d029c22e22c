"""The engine on the screen: how far loading is, its model before the first message, its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.widgets import Static

from localkv.chat.cache_figures import CacheFigures, cache_figures
from localkv.chat.engine import LOAD_STAGES, EngineFacts, Finished, LoadProgress
from localkv.errors import LocalKVError, counted
from localkv.tui.figures import bar, size, spread

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LoadStrip(Static):
    """One line above the prompt; it is not there while the engine is ready."""

    def on_mount(self) -> None:
        self._started = time.monotonic()
        self._progress: LoadProgress | None = None
        self._timer = self.set_interval(0.1, self._draw, pause=True)

    def start(self) -> None:
        """Loading begins."""
        self._started = time.monotonic()
        self._progress = LoadProgress(LOAD_STAGES[0])
        self.remove_class("-error")
        self.display = True
        self._timer.resume()
        self._draw()

    def show_progress(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._draw()

    def done(self) -> None:
        """The engine is ready."""
        self._timer.pause()
        self.display = False

    def fail(self, error: LocalKVError) -> None:
        """There is no engine."""
        self._timer.pause()
        self.add_class("-error")
        self.display = True
        hint = f" ({error.hint})" if error.hint else ""
        self.update(
            Content(f"✗ {error.message}{hint}\n  F5 starts the engine again, /model another")
        )

    def _draw(self) -> None:
        if self._progress is None:
            return
        elapsed = time.monotonic() - self._started
        at = LOAD_STAGES.index(self._progress.stage)
        parts: list[Content] = []
        for i, stage in enumerate(LOAD_STAGES):
            if i < at:
                parts.append(Content.assemble(("✓ ", "$success"), (stage, "$muted")))
            elif i == at:
                spin = _SPINNER[int(elapsed * 10) % len(_SPINNER)]
                parts.append(Content.assemble((f"{spin} ", "$primary"), (stage, "bold")))
                if self._progress.total:
                    counted = f" {self._progress.done}/{self._progress.total}"
                    parts[-1] += Content.styled(counted, "$muted")
            else:
                parts.append(Content.styled(f"· {stage}", "$muted"))
        once = ", compiled for this CPU, once" if at == len(LOAD_STAGES) - 1 and elapsed > 5 else ""
        parts.append(Content.styled(f"{elapsed:.0f} s{once}", "$muted"))
        self.update(Content("   ").join(parts))


NEARLY_FULL = 0.85
"""Above this share of the context the meter warns."""


@dataclass(frozen=True)
class MeterState:
    """The values of the meter.

    Attributes:
        facts: of the loaded model; None before it is.
        n_tokens: tokens in the context; None if they were not counted yet.
        last: the last answer's figures.
        tokens_per_second: of the answer that is written now, or of the last.
        n_kept: tokens that came from the state which was kept of this session.
        pages: of a cache with a budget, how many have each pair of its ladder.
    """

    facts: EngineFacts | None = None
    n_tokens: int | None = None
    last: Finished | None = None
    tokens_per_second: float = 0.0
    n_kept: int = 0
    pages: tuple[int, ...] = ()


def _fill_style(share: float) -> str:
    return "$error" if share >= 1 else "$warning" if share >= NEARLY_FULL else "$primary"


class _Meter(Static):
    """Shows a state, and lays it out again when its width changes."""

    state = MeterState()

    def show(self, state: MeterState) -> None:
        self.state = state
        self.draw(state)

    def on_resize(self) -> None:
        self.draw(self.state)

    def draw(self, state: MeterState) -> None:
        raise NotImplementedError


class CacheMeter(_Meter):
    """The meter in a panel."""

    def draw(self, state: MeterState) -> None:
        if state.facts is None:
            self.update(Content.styled("no model yet", "$muted"))
            return
        width = self.content_size.width or 32
        lines = _context_lines(state.facts, state.n_tokens, state.last, width)
        if state.n_kept:
            kept = Content.styled(f"{state.n_kept:,} tokens", "$muted")
            lines.append(spread(Content.styled("kept from before", "$muted"), kept, width))
        if state.facts.layers:  # some servers do not tell
            lines += [Content(""), *_cache_lines(state.facts, width)]
            lines += _ladder_lines(state.facts, state.pages, width)
        self.update(Content("\n").join(lines))


def _context_lines(
    facts: EngineFacts, n_tokens: int | None, last: Finished | None, width: int
) -> list[Content]:
    if n_tokens is None:
        return [
            spread(Content.styled("Context", "bold"), f"{facts.n_ctx:,} tokens", width),
            bar(0, width, "$primary"),
            Content.styled("counting …", "$muted"),
            Content(""),
        ]
    share = n_tokens / facts.n_ctx if facts.n_ctx else 0.0
    left = max(0, facts.n_ctx - n_tokens)
    reused = f"{last.cached_tokens:,} of {last.prompt_tokens:,}" if last else "—"
    muted = "$muted"
    return [
        spread(Content.styled("Context", "bold"), f"{n_tokens:,} of {facts.n_ctx:,}", width),
        bar(share, width, _fill_style(share)),
        spread(
            Content.styled(f"{left:,} tokens left", _fill_style(share) if left < 1 else muted),
            Content.styled(f"{share:.0%}", muted),
            width,
        ),
        spread(Content.styled("prompt reused", muted), Content.styled(reused, muted), width),
    ]


def _cache_lines(facts: EngineFacts, width: int) -> list[Content]:
    """The bytes of K and of V, or of both together if they share a budget, beside f16's."""
    muted, figures = "$muted", cache_figures(facts)
    lines = [spread(Content.styled("KV cache", "bold"), size(figures.n_bytes), width)]
    sides = [
        ("K", figures.type_k, figures.bytes_k, "$primary"),
        ("V", figures.type_v, figures.bytes_v, "$accent"),
    ]
    if facts.kv_ladder:
        sides = [("K", "and V", figures.n_bytes, "$primary")]
    f16_bytes = figures.f16_bytes // len(sides)
    for side, name, n_bytes, style in sides:
        label = f"{side} {name:<8} {size(n_bytes):>9}  "
        lines.append(
            Content.assemble(
                (label[:1], f"bold {style}"),
                label[1:],
                bar(n_bytes / f16_bytes, max(4, width - len(label)), style),
            )
        )
    each = "each as f16" if len(sides) > 1 else "f16"
    f16 = f"{each:<11}{size(f16_bytes):>9}  "
    lines.append(
        Content.assemble((f16, muted), bar(1, max(4, width - len(f16)), "$foreground 40%"))
    )
    lines.append(
        Content.styled(f"{figures.share_of_f16:.0%} of f16's {size(figures.f16_bytes)}", muted)
    )
    for layers, of, n_tokens in figures.windows:
        lines.append(Content.styled(f"{layers} of {of} layers keep {n_tokens:,}", muted))
    return lines


def _ladder_lines(facts: EngineFacts, pages: tuple[int, ...], width: int) -> list[Content]:
    """How many pages have each pair of the ladder, if the cache has a budget."""
    total = sum(pages)
    lines = list[Content]()
    for i, pair in enumerate(facts.kv_ladder):
        n = pages[i] if i < len(pages) else 0
        label = f"{pair:<11} {counted(n, 'page'):>9}  "
        share = n / total if total else 0.0
        style = "$foreground" if n else "$muted"
        lines.append(
            Content.assemble((label, style), bar(share, max(4, width - len(label)), "$primary"))
        )
    return lines


class StatusLine(_Meter):
    """The meter in one line, for screens without room for the panel."""

    def draw(self, state: MeterState) -> None:
        if state.facts is None:
            self.update("")
            return
        facts = state.facts
        used = state.n_tokens
        share = (used or 0) / facts.n_ctx if facts.n_ctx else 0.0
        line = Content.assemble(
            bar(share, 8, _fill_style(share)),
            f" {'…' if used is None else f'{used:,}'} of {facts.n_ctx:,}",
        )
        rate = state.tokens_per_second
        width = self.content_size.width or 76
        speed = Content(f"{rate:,.0f} tok/s" if rate else "")
        parts = [speed]
        if facts.layers:
            figures = cache_figures(facts)
            mix = ladder_words(facts, state.pages)
            f16 = "" if figures.is_f16 else f"f16: {size(figures.f16_bytes)}"
            cache = [mix or cache_types(facts, figures), Content(size(figures.n_bytes))]
            parts = [*cache, speed, Content.styled(f16, "$muted")]
        for part in parts:
            if part and line.cell_length + 3 + part.cell_length <= width:
                line = Content.assemble(line, "   ", part)
        self.update(line)


def ladder_words(facts: EngineFacts, pages: tuple[int, ...]) -> Content:
    """The pairs of the ladder that pages have, and how many; empty without a ladder."""
    found = zip(facts.kv_ladder, pages, strict=False)
    return Content("  ".join(f"{n}×{pair}" for pair, n in found if n))


def cache_types(facts: EngineFacts, figures: CacheFigures) -> Content:
    """The types of K and of V, or the one that both have, or where a ladder begins and ends."""
    if facts.kv_ladder:
        return Content(f"KV {facts.kv_ladder[0]} to {facts.kv_ladder[-1]}")
    if figures.type_k == figures.type_v:
        return Content(f"KV {figures.type_k}")
    k, v = ("K ", "bold $primary"), ("  V ", "bold $accent")
    return Content.assemble(k, figures.type_k, v, figures.type_v)


_KEYS = "/ lists commands, F1 keys, Ctrl+O sessions"


class Welcome(Static):
    """The screen of an empty conversation: the model, and how to find out the rest."""

    def show_loading(self, name: str) -> None:
        """The model is not there yet."""
        self.update(
            Content.assemble((name, "bold"), "\n", ("loading; you can write already", "$muted"))
        )

    def show_model(self, facts: EngineFacts, carried: Sequence[str] = ()) -> None:
        """The model is there.

        Args:
            facts: of the engine.
            carried: settings that came along from the chat before.
        """
        lines = [Content.styled(facts.name, "bold")]
        if facts.layers:
            figures = cache_figures(facts)
            f16 = "" if figures.is_f16 else f"   f16 would take {size(figures.f16_bytes)}"
            lines += [
                Content.styled(
                    f"{facts.n_ctx:,} tokens of context in {size(figures.n_bytes)}", "$muted"
                ),
                Content.assemble(cache_types(facts, figures), (f16, "$muted")),
            ]
        else:
            lines.append(Content.styled(facts.server, "$muted"))
        if carried:
            lines += [Content(""), Content.styled("as before: " + ", ".join(carried), "$muted")]
        lines += [Content(""), Content.styled(_KEYS, "$muted")]
        self.update(Content("\n").join(lines))
