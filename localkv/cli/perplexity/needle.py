"""`localkv perplexity --needle`: what caches recall of a sentence far back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localkv.cli.output.table import table
from localkv.cli.output.text_output import TextOutput
from localkv.cli.perplexity.progress import ChunkProgress
from localkv.cli.perplexity.report import identity, types_json

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.llm import LLM


def find_needles(
    llm: LLM,
    ids: Sequence[int],
    caches: Sequence[CacheConfig],
    text_facts: dict[str, Any] | None,
) -> None:
    """Measure and print; `text_facts` are for JSON, None for a table.

    Raises:
        UsageError: the text or the context is too short.
    """
    from localkv.quality.needle import plant, recall

    tokenizer = llm.tokenizer
    planted = plant(
        lambda text: llm.tokenize(text, add_special=False),
        ids,
        llm.cache.n_ctx,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
    )
    found = []
    with ChunkProgress(len(caches) * len(planted)) as progress:
        for cache in caches:
            for needles in planted:
                one = recall(llm.engine.model, cache, needles, n_batch=llm.engine.n_batch)
                found.append((cache, one))
                if progress.on_terminal:
                    progress.show_chunk(len(found), f"{one.right} of {one.count} found")
    with TextOutput(None) as out:
        if text_facts is not None:
            recalled = [{**types_json(cache), **asdict(one)} for cache, one in found]
            facts = {**identity(llm), "text": text_facts, "n_ctx": llm.cache.n_ctx}
            out.write(json.dumps({**facts, "needles": recalled}, ensure_ascii=False))
            return
        rows = [("K/V", "tokens back", "found", "ln p")]
        for cache, one in found:
            right = f"{one.right} of {one.count}"
            rows.append((cache.types_text, f"{one.distance:,}", right, f"{one.log_p:.3g}"))
        out.write("\n".join(table(rows)))
