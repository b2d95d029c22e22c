"""Write the tables of README.md and docs/models.md that follow from the code.

    python docs/make_models_tables.py

Architectures come from the registry (`localkv/arch`), the cache's bytes from the arithmetic of
`localkv plan`. Each table stands between two comments that name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from localkv.arch import ARCHS
from localkv.arch.examples import EXAMPLES
from localkv.config import CacheConfig
from localkv.loader.known_models import KNOWN_MODELS
from localkv.memory.plan import MemoryPlan, ModelMemory

ROOT = Path(__file__).parents[1]
CONTEXTS = (4096, 131072)
TYPES = ("f16", "q8_0", "q4_0")
POPULAR = (
    "llama-8b",
    "llama-70b",
    "mistral-small-24b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen35-9b",
    "qwen3.6-27b",
    "qwen35-35b-a3b",
    "gemma3-4b",
    "gemma3-27b",
    "gemma4-e4b",
    "gemma4-31b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "glm-4.5-air",
    "glm-4.7-flash",
    "deepseek-v3",
    "phi-4",
    "granite-4-h-tiny",
    "olmo3-7b",
    "lfm2-1.2b",
)


KNOWN = {
    "attention and dense blocks": (
        "llama", "mistral3", "qwen2", "qwen3", "phi3", "olmo2", "granite", "command-r", "glm4",
        "exaone4", "smollm3", "seed_oss",
    ),
    "windows, shared K and V, inputs by layer": ("gemma2", "gemma3", "gemma3n", "gemma4"),
    "routed experts": (
        "gpt-oss", "qwen3moe", "llama4", "glm4moe", "minimax-m2", "ernie4_5-moe", "hunyuan-moe",
        "olmoe", "granitemoe", "step35", "mimo2", "laguna",
    ),
    "latent attention": ("deepseek2", "mistral4", "minicpm3"),
    "recurrent layers": (
        "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h",
        "nemotron_h_moe", "falcon-h1", "bailingmoe3", "kimi-linear",
    ),
}  # fmt: skip
"""Architectures that most people mean, by what their layers have."""


def architectures() -> Iterator[str]:
    """Each that is supported, and models of it."""
    yield "| `general.architecture` | Models |"
    yield "|---|---|"
    for name in sorted(ARCHS):
        yield f"| `{name}` | {EXAMPLES[name]} |"


def _plan(name: str, type_name: str, n_ctx: int) -> MemoryPlan:
    memory = ModelMemory((), KNOWN_MODELS[name].spec, "cpu", 512, 1)
    return memory.plan(CacheConfig(type_name, type_name, n_ctx=n_ctx))


def _kib_per_token(name: str, type_name: str, n_ctx: int) -> str:
    plan = _plan(name, type_name, n_ctx)
    return f"{(plan.cache_k + plan.cache_v) / n_ctx / 1024:.1f}"


def cache_sizes() -> Iterator[str]:
    """KiB per token of a full context, and MiB of states, of popular models."""
    heads = [f"{n // 1024}k, {name}" for n in CONTEXTS for name in TYPES]
    yield f"| KiB per token | {' | '.join(heads)} | states |"
    yield f"|---|{'---:|' * len(heads)}---:|"
    for name in POPULAR:
        cells = [_kib_per_token(name, kind, n) for n in CONTEXTS for kind in TYPES]
        states = _plan(name, "f16", CONTEXTS[0]).states
        cells.append(f"{states / 2**20:.1f} MiB" if states else "")
        yield f"| {name} | {' | '.join(cells)} |"


def known_models() -> Iterator[str]:
    """Some of them, for a page where a table of all would be long."""
    page = "[docs/models.md](docs/models.md)"
    yield f"Of the {len(ARCHS)} architectures in {page} these are best known:"
    yield ""
    yield "| Layers with | Models |"
    yield "|---|---|"
    for layers, names in KNOWN.items():
        yield f"| {layers} | {'; '.join(EXAMPLES[name] for name in names)} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "architectures": architectures,
    "known models": known_models,
    "cache sizes": cache_sizes,
}
PAGES = (ROOT / "README.md", ROOT / "docs" / "models.md")


def with_tables(text: str) -> str:
    """A page with its tables made again."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if begin in text:
            table = "\n" + "\n".join(rows()) + "\n\n"
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
