"""The output of `localkv perplexity`: llama-perplexity's lines, the table of a sweep, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from localkv.cli.model.loading import all_warnings
from localkv.cli.output.table import table

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.config import CacheConfig
    from localkv.llm import LLM
    from localkv.quality.base_file import BaseFile
    from localkv.quality.statistics import Divergence, Estimate

MIB = 1 << 20


@dataclass(frozen=True)
class CacheResult:
    """The measurements of one cache; without a divergence if it was compared with nothing."""

    cache: CacheConfig
    ppl: Estimate
    divergence: Divergence | None


def divergence_lines(result: CacheResult) -> list[str]:
    """The statistics in llama-perplexity's words and order."""
    d = result.divergence
    assert d is not None
    lines = [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {_plain(result.ppl)}",
        f"Mean PPL(base)                : {_plain(d.ppl_base)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * d.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {_plain(d.log_ppl_ratio)}",
        f"Mean PPL(Q)/PPL(base)         : {_plain(d.ppl_ratio)}",
        f"Mean PPL(Q)-PPL(base)         : {_plain(d.ppl_difference)}",
    ]
    lines += ["", "====== KL divergence statistics ======"]
    lines.append(f"Mean    KLD: {_plain(d.kld)}")
    lines += [f"{_place(at)} KLD: {value:10.6f}" for at, value in d.kld_percentiles.items()]
    lines += ["", "====== Token probability statistics ======"]
    lines.append(f"Mean    Δp: {_percent(d.delta_p)}")
    lines += [f"{_place(at)} Δp: {100 * p:6.3f}%" for at, p in d.delta_p_percentiles.items()]
    lines.append(f"RMS Δp    : {_percent(d.rms_delta_p)}")
    lines.append(f"Same top p: {_percent(d.same_top)}")
    return lines


_NAMES = {100.0: "Maximum", 50.0: "Median ", 0.0: "Minimum"}


def _place(percentile: float) -> str:
    return _NAMES.get(percentile) or f"{percentile:4.1f}%  "


def _plain(estimate: Estimate) -> str:
    return f"{estimate.value:10.6f} ± {estimate.error:10.6f}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:6.3f} ± {100 * estimate.error:5.3f} %"


def sweep_lines(results: Sequence[CacheResult], config: ModelSpec, n_batch: int) -> list[str]:
    """One row per cache, in the order they were named."""
    from localkv.memory.kv_bytes import context_bytes, mean_bits_of

    header = ("K/V", "bits", "KV MiB", "PPL", "+/-", "KLD mean", "+/-", "KLD 99 %", "RMS Δp")
    rows = [(*header, "same top")]
    for result in results:
        cache, d = result.cache, result.divergence
        assert d is not None
        rows.append(
            (
                "/".join(cache.shown_types),
                f"{mean_bits_of(cache, config):g}",
                f"{context_bytes(cache, config, n_batch) / MIB:.3f}",
                f"{result.ppl.value:.4f}",
                f"{result.ppl.error:.4f}",
                f"{d.kld.value:.3g}",
                f"{d.kld.error:.1g}",
                f"{d.kld_percentiles[99]:.3g}",
                f"{100 * d.rms_delta_p.value:.3f} %",
                f"{100 * d.same_top.value:.2f} %",
            )
        )
    return table(rows)


def types_json(cache: CacheConfig) -> dict[str, Any]:
    """The types of a cache; with a budget those that pages begin in, and all of its ladder."""
    type_k, type_v = cache.shown_types
    if cache.kv_budget is None:
        return {"type_k": type_k, "type_v": type_v}
    ladder = [f"{k}/{v}" for k, v in cache.kv_ladder]
    return {"type_k": type_k, "type_v": type_v, "kv_budget": cache.kv_budget, "kv_ladder": ladder}


def _sizes_json(llm: LLM, cache: CacheConfig) -> dict[str, Any]:
    """Bits of a value, and bytes of a full context; within a budget bits differ from page to page,
    and the bytes are those that are allocated."""
    from localkv.memory.kv_bytes import context_bytes, mean_bits_of

    if cache.kv_budget is not None:
        return {"bits_per_value": None, "bytes": llm.memory.cache_k + llm.memory.cache_v}
    return {
        "bits_per_value": mean_bits_of(cache, llm.config),
        "bytes": context_bytes(cache, llm.config, llm.engine.n_batch),
    }


def to_json(
    llm: LLM,
    text: Mapping[str, Any],
    base: CacheConfig | BaseFile | None,
    results: Sequence[CacheResult],
    seconds: float,
    *,
    prefill_exact: bool,
) -> dict[str, Any]:
    """The object of `--json`. Divergences are in nats; Δp and shares are fractions, not percent."""
    found = []
    for result in results:
        cache = result.cache
        found.append(
            {
                **types_json(cache),
                **_swa_json(cache, llm.config),
                "kv_rotation": cache.kv_rotation,
                **_sizes_json(llm, cache),
                "ppl": asdict(result.ppl),
                "divergence": _divergence_json(result.divergence),
            }
        )
    return {
        **identity(llm),
        "text": dict(text),
        "n_ctx": llm.cache.n_ctx,
        "n_batch": llm.engine.n_batch,
        "prefill_exact": prefill_exact,
        "base": _base_json(base),
        "results": found,
        "seconds": seconds,
        "backend": llm.backend.name,
        "warnings": all_warnings(llm),
    }


def _swa_json(cache: CacheConfig, config: ModelSpec) -> dict[str, str]:
    """The types of layers with a window, if there are any."""
    if not any(group.reach for group in config.groups):
        return {}
    type_k, type_v = cache.types_of(windowed=True)
    return {"type_k_swa": type_k, "type_v_swa": type_v}


def _base_json(base: CacheConfig | BaseFile | None) -> dict[str, str] | None:
    from localkv.quality.base_file import BaseFile

    if base is None:
        return None
    cache, file = (base.facts, {"file": base.path}) if isinstance(base, BaseFile) else (base, {})
    types = {"type_k": cache.type_k, "type_v": cache.type_v, "kv_rotation": cache.kv_rotation}
    return {**types, **file}


def identity(llm: LLM) -> dict[str, Any]:
    """Which model it is."""
    config = llm.config
    return {
        "model": {
            "path": str(llm.gguf.path),
            "name": config.name,
            "architecture": config.architecture,
        }
    }


def _divergence_json(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    fields = asdict(divergence)
    for name in ("kld_percentiles", "delta_p_percentiles"):
        fields[name] = {f"{at:g}": value for at, value in fields[name].items()}
    return fields
