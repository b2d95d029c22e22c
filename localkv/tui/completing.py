"""`Completing`: hints to slash commands and names of models as they are typed, and Tab."""

from __future__ import annotations

import asyncio
import os.path

from textual import on, work
from textual.widgets import TextArea

from localkv.tui.queueing import Queueing
from localkv.tui.slash_commands import COMMANDS
from localkv.tui.widgets.prompt import CommandHints, Prompt

_USAGES = [(command.usage, command.description) for command in COMMANDS]
_MODEL = "/model "


class Completing(Queueing):
    """Completes what begins with a slash in the prompt."""

    @on(TextArea.Changed, "Prompt")
    def _typed(self, event: TextArea.Changed) -> None:
        text = event.text_area.text
        self.query_one(CommandHints).show_matching(text, _USAGES)
        if text.startswith(_MODEL) and "\n" not in text:
            self._hint_at_models(text)

    @work(group="completion", exclusive=True)
    async def _hint_at_models(self, text: str) -> None:
        names = await self._model_names(text)
        if self.query_one(Prompt).text == text:
            self.query_one(CommandHints).show_names(names)

    async def _model_names(self, text: str) -> list[str]:
        typed = text.removeprefix(_MODEL).lstrip()
        return await asyncio.to_thread(lambda: self.models.completions(typed))

    def action_complete(self) -> None:
        """Complete a slash command or the name of a model, or move on to the next field."""
        prompt = self.query_one(Prompt)
        word = prompt.text
        names = [command.name for command in COMMANDS if command.name.startswith(word)]
        if prompt.has_focus and word.startswith(_MODEL):
            self._complete_model(word)
        elif prompt.has_focus and word.startswith("/") and names:
            prompt.fill(names[0] + " ")
        else:
            self.focus_next()

    @work(group="completion", exclusive=True)
    async def _complete_model(self, text: str) -> None:
        """Add what all names have in common that begin so; the first of them if that is nothing."""
        names = await self._model_names(text)
        prompt = self.query_one(Prompt)
        if not names or prompt.text != text:
            return
        typed = text.removeprefix(_MODEL).lstrip()
        # of letters, as a shell does it, and not of parts of a path
        common = os.path.commonprefix(names)  # noqa: RUF071
        prompt.fill(_MODEL + (common if len(common) > len(typed) else names[0]))
