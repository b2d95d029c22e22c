"""`--base` and `--save-base` of `localkv perplexity`: logits that later runs are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from localkv.cli.output.text_output import check_writable
from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.llm import LLM
    from localkv.quality.base_file import BaseFile, BaseWriter


def check_base_options(
    path: str | None, save_path: str | None, *, compare: bool, prefill_exact: bool
) -> None:
    """Refuse options that can't work before anything is loaded."""
    if path is not None:
        if save_path is not None:
            raise UsageError("--base reads a base and --save-base writes one, use one")
        from localkv.quality.base_file import BaseFile

        BaseFile(path)  # raises the error, if any
    if save_path is not None:
        if prefill_exact and not compare:
            raise UsageError(
                "--save-base writes the logits of a cache, which --prefill-exact bypasses",
                hint="leave out one of them, or add --kl-divergence",
            )
        check_writable(Path(save_path))


def open_base(path: str, llm: LLM, chunks: Sequence[Sequence[int]]) -> BaseFile:
    """The base in a file, if it was made from these chunks with this vocabulary."""
    from localkv.quality.base_file import BaseFile

    base = BaseFile(path)
    base.check(llm.cache.n_ctx, llm.config.n_vocab, _vocabulary(llm), chunks)
    return base


def base_writer(
    path: str | None,
    llm: LLM,
    base: CacheConfig | BaseFile | None,
    chunks: Sequence[Sequence[int]],
) -> AbstractContextManager[BaseWriter | None]:
    """A writer of the base to a file, or nothing if no file is wanted."""
    from localkv.quality.base_file import BaseFacts, BaseFile, BaseWriter
    from localkv.quality.chunks import n_scored

    if path is None or base is None or isinstance(base, BaseFile):
        return nullcontext()
    facts = BaseFacts(
        model=llm.config.name,
        type_k=base.type_k,
        type_v=base.type_v,
        kv_rotation=base.kv_rotation,
        n_ctx=llm.cache.n_ctx,
        n_vocab=llm.config.n_vocab,
        vocabulary=_vocabulary(llm),
    )
    return BaseWriter(path, facts, chunks, n_scored(llm.cache.n_ctx))


def _vocabulary(llm: LLM) -> str:
    from localkv.quality.base_file import vocabulary_hash

    return vocabulary_hash(llm.gguf.metadata.strings("tokenizer.ggml.tokens"))
