"""Texts that are generated at the same time, read to their ends."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.engine.requests.batch_engine import BatchEngine
from localkv.engine.text.stream import Completion, TextStream


def completions(batch: BatchEngine, streams: Sequence[TextStream]) -> list[Completion]:
    """Run steps until all streams have ended, and read each as its tokens come: so one that ends
    with a stop string makes room for others at once.

    Raises:
        LocalKVError: the model yields NaN.
    """
    reading = list(streams)
    while reading:
        reading = [stream for stream in reading if _goes_on(stream)]
        if reading:
            batch.step()
    return [stream.completion for stream in streams]


def _goes_on(stream: TextStream) -> bool:
    """Read what is there of a stream; whether more is to come."""
    generation = stream.generation
    while generation.n_ready or generation.has_ended:
        if next(stream, None) is None:
            return False
    return True
