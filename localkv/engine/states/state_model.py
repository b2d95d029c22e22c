"""`StateModel`: a model that saves texts with their rows to files, and takes them back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from localkv.engine.api.loaded_model import LoadedModel
from localkv.engine.states.state_identity import UNROTATED
from localkv.loader.model_fingerprint import model_identity
from localkv.option_types import check_types

if TYPE_CHECKING:
    from localkv.loader.smoothing import Smoothing


class StateModel(LoadedModel):
    """Texts in the cache to files, and back."""

    _smoothing: Smoothing | None
    _k_before_rope: bool

    def save_state(self, path: str | os.PathLike[str], ids: Sequence[int] | None = None) -> int:
        """Write the text that was evaluated last, prompt and answer, with its rows of K and V.

        The file takes its name once all of it is on the disk. It serves this model with the same
        types of K and V, on any device and in any context that has room (docs/states.md).

        Args:
            ids: write the text that begins most like these tokens instead, of those that are kept.

        Returns:
            the tokens of the text.

        Raises:
            UsageError: nothing was evaluated, or the file can't be written.
        """
        from localkv.engine.states.state_turns import save_state

        check_types(StateModel.save_state, locals())

        return save_state(self.engine.slot, path, self._identity, ids)

    def load_state(
        self,
        path: str | os.PathLike[str],
        *,
        convert: bool = False,
        on_note: Callable[[str], None] = lambda line: None,
    ) -> list[int]:
        """Take a text that `save_state` wrote into the cache: prompts that begin like it go on
        from there, with the bits that they would have without the file.

        All of the file is checked before the cache changes.

        Args:
            convert: pack K and V anew if the state has them in other types; then what follows is
                not what it would be without the file.
            on_note: called with a line that says what this changed.

        Returns:
            the text's token ids, which `complete` and `stream` take as a prompt.

        Raises:
            UsageError: the file can't be read, is damaged, or is of another model, of other types
                of K and V, or for a larger context.
        """
        from localkv.engine.states.state_turns import load_state

        check_types(StateModel.load_state, locals())

        return load_state(
            self.engine.slot,
            path,
            self._identity,
            convert=self.cache if convert else None,
            on_note=on_note,
        )

    @property
    def _identity(self) -> dict[str, str]:
        from localkv.engine.states.state_conversion import choices_json

        model = model_identity(self.gguf, self.config, self.cache.n_ctx, self._smoothing)
        if self._k_before_rope:
            model["rope"] = UNROTATED
        return {**model, "choices": choices_json(self.cache)}
