"""The model that is measured, ready on a backend."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.bench.source import Source
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.select import select_backend, unused_gpu
from localkv.llm import LLM
from localkv.loader.synthetic import synthetic_model
from localkv.model import Transformer


@dataclass(frozen=True)
class Subject:
    """A model on a backend, where it is from, and lines that the user should see."""

    source: Source
    model: Transformer
    warnings: tuple[str, ...] = ()


def load(source: Source, device: str = "auto", fit: str = "on") -> Subject:
    """Load a file, or draw random weights.

    Raises:
        LocalKVError: as `LLM` does.
    """
    if source.path is None:
        shape, _, type_name = source.name.partition(":")
        model = synthetic_model(shape, type_name, select_backend(device))
        line = unused_gpu(device)
        return Subject(source, model, (line,) if line else ())
    llm = LLM(source.path, n_ctx=PAGE_TOKENS, device=device, fit=fit, progress=False)
    if llm.backend.late is not None:
        llm.backend.late.finish()
    return Subject(source, llm.engine.model, tuple(llm.warnings))
