"""Answers of one request as they come, split into their parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from localkv.errors import LocalKVError
from localkv.server.answer import AnswerReader, Delta
from localkv.server.engine_client import Texts, named_error
from localkv.server.failures import as_request_error
from localkv.server.wire import Ended, Event, Piece


class Answers:
    """One answer or more to the same prompt.

    Args:
        texts: as the engine writes them.
        readers: one for each.
        prompt: the text of the conversation, as the model reads it.
        n_prompt: its tokens.

    Attributes:
        ends: of the answers, None for those that go on.
    """

    def __init__(
        self, texts: Texts, readers: Sequence[AnswerReader], prompt: str = "", n_prompt: int = 0
    ) -> None:
        self.texts = texts
        self.prompt, self.n_prompt = prompt, n_prompt
        self.readers = list(readers)
        self.ends: list[Ended | None] = [None] * len(self.readers)

    @property
    def ended(self) -> list[Ended]:
        """The ends that are known."""
        return [end for end in self.ends if end is not None]

    async def news(self) -> AsyncIterator[tuple[int, Event, list[Delta]]]:
        """What happens: the number of an answer, the event, and the deltas that it brings.

        Raises:
            RequestError: an answer can't be completed.
        """
        try:
            async for events in self.texts:
                for index, event in events:
                    yield index, event, self._deltas(index, event)
        except LocalKVError as error:
            raise as_request_error(error) from error

    def _deltas(self, index: int, event: Event) -> list[Delta]:
        reader = self.readers[index]
        if isinstance(event, Piece):
            return reader.push(event.text)
        if isinstance(event, Ended):
            if event.error:
                raise as_request_error(named_error(event.kind, event.error))
            self.ends[index] = event
            return reader.end(is_cut=event.finish_reason != "stop" or event.stop is not None)
        return []

    def close(self) -> None:
        """Nobody reads the rest."""
        self.texts.close()
