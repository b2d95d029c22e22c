"""A file's model in an engine: kernels are compiled while its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localkv.engine.engine import Engine
from localkv.loader.weights import load_model, lock_weights

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.config import CacheConfig
    from localkv.engine.speculation.config import Speculation
    from localkv.kernels.backend import Backend
    from localkv.loader.gguf_file import GGUFFile
    from localkv.loader.smoothing import Smoothing
    from localkv.system.loading_line import OnProgress

FEW_NAMES = 8
"""Names of tensors that a warning spells out."""


@dataclass(frozen=True)
class LoadedEngine:
    """What became of a file.

    Attributes:
        engine: warmed up as far as its backend compiles kernels.
        unused: names of tensors that the model does not use.
        warnings: one line each for the user.
    """

    engine: Engine
    unused: list[str]
    warnings: list[str]


def loaded_engine(
    gguf: GGUFFile,
    config: ModelSpec,
    backend: Backend,
    cache: CacheConfig,
    *,
    n_batch: int,
    exact: bool,
    smoothing: Smoothing | None,
    speculation: Speculation,
    mlock: bool,
    use_mmap: bool,
    report: OnProgress,
) -> LoadedEngine:
    """Load a model's weights and allocate its cache.

    Args:
        n_batch: most prompt tokens evaluated at a time.
        exact: as `LLM` has it.
        smoothing: what the weights are changed by.
        speculation: how tokens are guessed, which takes kernels of its own.
        mlock: keep the weights in memory.
        use_mmap: the file is mapped; weights that lie in it may be laid out while the first tokens
            are evaluated, unless they are locked.
        report: told of the progress.

    Raises:
        LocalKVError: the file can't be read, or something does not fit in memory.
    """
    warnings = []
    matrix_types = [t.format.name for t in gguf.tensors.values() if len(t.shape) > 1]
    with backend.compiling_ahead(
        gguf.tensors["token_embd.weight"].format.name,
        matrix_types,
        config,
        cache,
        lambda done, of: report("kernels", done, of),
    ) as all_linked:
        model, unused = load_model(
            gguf,
            backend,
            on_layer=lambda done, of: report("weights", done, of),
            smoothing=smoothing,
            late=use_mmap and not mlock,
        )
        if mlock and (problem := lock_weights(model.weights, backend)):
            warnings.append(problem)
        engine = Engine(
            model, cache, n_batch=n_batch, exact=exact, check_source=gguf.check_unchanged
        )
        if backend.compiles:
            report("kernels", 0, 0)
            if speculation.is_on or not all_linked:
                engine.warm_up()
            if speculation.is_on:
                engine.warm_up_drafts(speculation)
        if backend.late is not None:
            backend.late.begin()
    if unused:
        warnings.append(f"tensors that are not used: {_a_few(unused)}")
    return LoadedEngine(engine, unused, warnings)


def _a_few(names: list[str]) -> str:
    """The first names, and how many others there are."""
    if len(names) <= FEW_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:FEW_NAMES])} and {len(names) - FEW_NAMES} others"
