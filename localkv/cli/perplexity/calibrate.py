"""`localkv perplexity --calibrate-kv`: measures how large K and V get, and writes it down."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localkv.cache.scales import write_kv_scales
from localkv.cli.output.text_output import TextOutput
from localkv.cli.perplexity.progress import ChunkProgress
from localkv.cli.perplexity.report import identity
from localkv.errors import counted

if TYPE_CHECKING:
    from localkv.llm import LLM


def calibrate_kv(
    llm: LLM, pieces: list[list[int]], path: str, text_facts: dict[str, Any] | None
) -> None:
    """Measure and write the scales; `text_facts` are for JSON, None for a line of text."""
    from localkv.quality.calibration import calibrate

    scales = None
    with ChunkProgress(len(pieces)) as progress:
        found = calibrate(
            llm.engine.model,
            pieces,
            n_ctx=llm.cache.n_ctx,
            kv_rotation=llm.cache.kv_rotation,
            n_batch=llm.engine.n_batch,
        )
        for n_done, scales_so_far in enumerate(found, start=1):
            scales = scales_so_far
            if progress.on_terminal:
                progress.show_chunk(n_done, "K and V of every head")
    assert scales is not None  # a text has a chunk
    write_kv_scales(path, scales)
    with TextOutput(None) as out:
        if text_facts is not None:
            facts = {**identity(llm), "text": text_facts, "n_ctx": llm.cache.n_ctx}
            facts["kv_scales"] = {"path": path, **asdict(scales)}
            out.write(json.dumps(facts, ensure_ascii=False))
        else:
            out.write(
                f"{path}: K up to {max(map(max, scales.absmax_k)):.4g}, "
                f"V up to {max(map(max, scales.absmax_v)):.4g}, "
                f"in {counted(scales.n_layers, 'layer')} of "
                f"{counted(scales.n_kv_heads, 'KV head')}, over {counted(scales.n_tokens, 'token')}"
            )
