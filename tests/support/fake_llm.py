"""Stands in for `LLM`: remembers what it was asked, and answers from a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from localkv.cache.layout import CodebookUse, SegmentSpec
from localkv.config import CacheConfig
from localkv.engine.speculation.config import Speculation
from localkv.engine.stream import Completion, Degeneration, Timings, Usage
from localkv.memory.plan import MemoryPlan
from localkv.system.threads import Threads


class FakeStream(Iterator[str]):
    """Pieces of text, then a completion of them."""

    def __init__(self, pieces: list[str], finish_reason: str, context_full: bool) -> None:
        self.pieces = iter(pieces)
        self.completion = Completion(
            text="".join(pieces),
            finish_reason=finish_reason,
            usage=Usage(3, len(pieces), 3 + len(pieces), 0),
            timings=Timings(0.5, 6.0, 0.25, 4.0),
            seed=42,
            context_full=context_full,
        )

    def __next__(self) -> str:
        return next(self.pieces)

    def degeneration(self) -> Degeneration:
        return Degeneration(None, None)


@dataclass
class FakePrompt:
    """A conversation, and what it is rendered with."""

    asked: dict[str, Any]
    warnings: tuple[str, ...]


class FakeLLM:
    """Class attributes are the script and the record; a test gets a fresh subclass."""

    pieces: ClassVar[list[str]] = ["one", " two"]
    finish_reason = "stop"
    context_full = False
    warnings: ClassVar[list[str]] = []
    prompt_warnings: tuple[str, ...] = ()
    loaded: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[dict[str, Any]] = {}
    speculation = Speculation()
    draft = None
    has_chat_template = False

    def __init__(self, path: Path, *, on_progress: object = None, **arguments: Any) -> None:
        type(self).loaded = {"path": path, **arguments}
        self.load_seconds = 0.125
        self.config = SimpleNamespace(
            name="fake", architecture="llama", groups=(), is_encoder=False
        )
        self.gguf = SimpleNamespace(path=path, n_bytes=1 << 20)
        self.tokenizer = SimpleNamespace(warnings=(), read_seconds=0.25)
        self.backend = SimpleNamespace(name="cpu", hardware="")
        self.kernels = {"attention": "fake", "products": "q4_0: panels; f32: rows"}
        self.cache = CacheConfig(arguments["cache_type_k"], arguments["cache_type_v"], n_ctx=64)
        segment = SegmentSpec(self.cache.type_k, self.cache.type_v, 0, 64, 0)
        books = [CodebookUse(0, "v", "nuq4", False)] * (self.cache.type_v == "nuq4")
        layouts = [SimpleNamespace(segments=[segment])]
        cache = SimpleNamespace(layouts=layouts, codebooks=books, ladder=None)
        threads = Threads(arguments["n_threads"] or 2, arguments["n_threads_batch"] or 3)
        self.engine = SimpleNamespace(cache=cache, slot=SimpleNamespace(threads=threads))
        self.memory = MemoryPlan(1 << 20, 1 << 10, 1 << 19, 1 << 19, 3 << 20)

    def chat_template_from(self, source: str) -> str:
        return f"template {source}"

    def chat_prompt(self, messages: list[dict[str, str]], **options: Any) -> FakePrompt:
        return FakePrompt({"messages": messages, **options}, self.prompt_warnings)

    def stream(self, prompt: str | FakePrompt, **options: Any) -> FakeStream:
        asked = prompt.asked if isinstance(prompt, FakePrompt) else {"prompt": prompt}
        type(self).asked = {**asked, **options}
        return FakeStream(self.pieces, self.finish_reason, self.context_full)
