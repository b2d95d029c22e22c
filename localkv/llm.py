"""`LLM`: a model file, a backend, a cache and a tokenizer put together. The public Python API."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, Never

from localkv.arch.spec import ModelSpec
from localkv.cache.cache_checks import check_before_rope
from localkv.cache.profile import KVProfile
from localkv.config import FIT, CacheConfig, KVScales
from localkv.engine.api.embedding_model import EmbeddingModel
from localkv.engine.api.loaded_engine import loaded_engine
from localkv.engine.api.text_model import CHAT_OPTIONS, STREAM_OPTIONS, TextModel
from localkv.engine.speculation.config import RECORDING_LEFT, Speculation, check_drafter
from localkv.engine.speculation.draft_model import DraftModel
from localkv.engine.states.state_model import StateModel
from localkv.errors import UsageError, counted, printable
from localkv.kernels.backend import Backend
from localkv.kernels.layer_kinds import check_layers
from localkv.kernels.select import select_backend, unused_gpu
from localkv.loader.chosen_cache import chosen_cache
from localkv.loader.gguf_file import open_gguf
from localkv.loader.smoothing import changed_tensors
from localkv.loader.weights import checked_spec
from localkv.memory.budgeted import Budgeted
from localkv.memory.cache_tokens import cache_in_bytes, cache_that_fits
from localkv.memory.context import beyond_training, chosen_context
from localkv.memory.draft_file import DraftFile
from localkv.memory.fit import check_fit
from localkv.memory.free_memory import free_memory
from localkv.memory.plan import ModelMemory
from localkv.option_names import check_options, keywords, unknown_name
from localkv.option_types import check_types
from localkv.system.bus_errors import end_cleanly_from_threads
from localkv.system.garbage import uncollected
from localkv.system.loading_line import OnProgress, reporting
from localkv.system.placement import place_caller, place_process
from localkv.system.threads import default_threads, use_threads


class LLM(TextModel, EmbeddingModel, StateModel):
    """A model ready to complete text.

    `close`, or the end of a `with` statement, frees its memory. Without either it is freed when
    nothing refers to the model any more.

    It may be used from several threads, and several of its streams may be read in turn: each call
    of the model is one turn, first come, first served, and every text is the one that it would be
    alone. With `n_parallel` above 1 a turn serves all streams that somebody reads; else it is
    slower to read streams in turn than one after the other, if the cache has no room for all of
    them. Different models run at the same time. A fork
    of the process can't use it (`LocalKVError`), nor can a signal handler that interrupts a call of
    it. After an exception in a call, such as Ctrl-C, it goes on with an empty cache.

    Args:
        path: a GGUF file (any part of a split one), or a model on Hugging Face: "hf.co/org/repo" or
            "hf.co/org/repo:Q8_0", fetched if it is not in the cache.
        n_ctx: tokens of context; 0 takes the model's own, None at most `DEFAULT_N_CTX` of it
            (`memory/context.py`).
        cache_type_k, cache_type_v: types of K and of V in the cache, names in `KV_FORMATS`.
        cache_type_k_swa, cache_type_v_swa: types of layers that see a window only; None for the
            same as of the others.
        swa_full: layers with a window keep all rows, not only those that later tokens see: that
            takes more memory, and any prompt goes on with all that it has in common with others.
        cache_type_k_rope: type of the rotated parts of keys in models that keep latents (DeepSeek);
            `cache_type_k` is that of the latents, which are V, too.
        ctx_checkpoints: copies of the states of recurrent layers that are kept at most, in the
            host's memory, to go on from where a prompt begins like an earlier one.
        checkpoint_min_step: tokens between two of them within a text.
        kv_tail: each token reads so many of the newest tokens as f16, and only those before them
            packed; None takes 64 for types that pack several tokens together, else 0.
        kv_sink: the first tokens that are kept as f16; None takes 4 for types of less than 4 bits
            per value, else 0.
        kv_rotation: "on" and "off" store K and V rotated, or not; "auto" rotates where
            that helps.
        k_before_rope: K is stored as it is before RoPE, and rotated as it is read; device
            "reference" only, to compare with.
        kv_scales: a file that `localkv perplexity --calibrate-kv` made, or its content; types that
            are scaled by head need it.
        kv_profile: a file that `localkv calibrate` made for this model, its content, or "auto",
            which looks for it beside the model and in the user's data folder. Each layer has the
            types that it lists, unless types are named here.
        kv_bits: bits per value, on average, that these may take in the context, with their tail
            and sink; None is 5.
        kv_budget: bytes of K and V together, or "auto" for what is free, less a reserve. When they
            are full, the oldest pages change to the next types of the ladder; the context ends
            where all of them have the last.
        kv_ladder: the pairs of types that pages go through, "f16,q8_0/q8_0,q4_0/q4_0" or a
            sequence of pairs; None takes f16, q8_0, q8_0/q4_0, q4_0.
        device: "auto", "cuda", "cpu" or "reference".
        n_threads: CPU threads; None takes `OMP_NUM_THREADS`, as far as there are cores, or one for
            each physical core. It has no effect on a GPU.
        n_threads_batch: CPU threads where several tokens are evaluated at once, as in prompts;
            None is `n_threads`.
        cpus: CPUs that this process may use from now on, by the system's numbers: the calling
            thread, those that it starts later, and kernels (on Linux). None leaves it to the
            system, as `taskset` or a container has it.
        cpu_strict: each thread of the kernels has one of them for itself.
        n_batch: most prompt tokens evaluated at a time.
        n_parallel: texts that are generated at the same time: by `complete_many`, and by streams
            that several threads read, or one in turn.
        n_cache_tokens: tokens that the cache holds of all of them together; None for `n_ctx` each,
            "fit" for four contexts, or what free memory has room for, if that is less.
        n_cache_bytes: bytes that K and V of all of them take together, instead of that; as many
            tokens as fit into them.
        step_ms: milliseconds that a step of all of them should take, on which it depends how long
            texts wait while another one's prompt is read; None is 100, or 30 on a GPU.
        exact: the same call gives the same result regardless of earlier calls, on a CPU bit for
            bit. Generated text is read again where the next prompt contains it. False reuses it as
            it lies in the cache: a conversation goes on sooner, and may go on with other words.
        override_pre: use this pre-tokenizer instead of the file's (`tokenizer.ggml.pre`).
        draft_model: a small GGUF file with the same tokens, which guesses how a text goes on.
        cache_type_k_draft, cache_type_v_draft: types of K and of V in its own cache.
        spec: "ngram" guesses how a text goes on from what followed its last tokens when they came
            up before, "draft" with `draft_model` (None does, if there is one), for a text that has
            the steps to itself. Guesses are evaluated together: faster where many are right, with
            the same text as without ("none"), byte for byte on a CPU.
        draft_max, draft_min: most tokens guessed at a time, and fewer that are not worth it; how
            many are is measured.
        draft_p_min: tokens that the draft model finds less probable are not guessed.
        fit: "on" refuses a model that does not fit in memory before anything is allocated, and
            warns of mapped weights that do not fit; "off" tries.
        mlock: keep the weights in memory (on a CPU). Where the system allows less, some are kept
            and a warning says how to raise its limit.
        use_mmap: map the file, of which the system keeps in memory what it has room for. False
            reads it into memory, which must have room.
        progress: show a line on stderr, where that is a terminal or a notebook's, if loading takes
            more than a second.
        on_progress: called instead while it loads, with "weights", the layers read and all layers,
            with "kernels", those compiled and all that have to be, and with "kernels", 0 and 0
            before they are run for the first time.

    Attributes:
        config: the model's sizes.
        cache: the cache's types and context length.
        kv_types: the types by layer that are taken from a profile, and what they cost; or None.
        memory: bytes of weights, cache and scratch.
        warnings: one line each for the user: unused tensors, a GPU that is not
            used, a context longer than the model was trained for, a cache type that this model is
            known to suffer from, weights that do not all stay in memory, an operation that is slow
            because it has no kernel.
        speculation: how tokens are guessed.
        draft: the model that guesses them, if there is one.
        load_seconds: time from the start to readiness.

    Raises:
        ModelFileError: the file can't be used.
        HubError: there is no such model on Hugging Face, or it can't be fetched.
        UsageError: an option does not exist (it is a `TypeError`, too), or can't be used with this
            model.
        DoesNotFitError: there is not enough memory.
    """

    draft: LLM | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        cache_type_k: str | None = None,
        cache_type_v: str | None = None,
        cache_type_k_swa: str | None = None,
        cache_type_v_swa: str | None = None,
        swa_full: bool = False,
        cache_type_k_rope: str = "f16",
        ctx_checkpoints: int = CacheConfig.ctx_checkpoints,
        checkpoint_min_step: int = CacheConfig.checkpoint_min_step,
        kv_tail: int | None = None,
        kv_sink: int | None = None,
        kv_rotation: str = "auto",
        k_before_rope: bool = False,
        kv_scales: str | os.PathLike[str] | KVScales | None = None,
        kv_profile: str | os.PathLike[str] | KVProfile | None = None,
        kv_bits: float | None = None,
        kv_budget: int | Literal["auto"] | None = None,
        kv_ladder: str | Sequence[tuple[str, str]] | None = None,
        device: str = "auto",
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        cpus: Collection[int] | None = None,
        cpu_strict: bool = False,
        n_batch: int = 512,
        n_parallel: int = 1,
        n_cache_tokens: int | Literal["fit"] | None = None,
        n_cache_bytes: int | None = None,
        step_ms: float | None = None,
        exact: bool = True,
        override_pre: str | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        cache_type_k_draft: str = CacheConfig.type_k,
        cache_type_v_draft: str = CacheConfig.type_v,
        spec: str | None = None,
        draft_max: int = Speculation.draft_max,
        draft_min: int = Speculation.draft_min,
        draft_p_min: float = Speculation.draft_p_min,
        fit: str = "on",
        mlock: bool = False,
        use_mmap: bool = True,
        progress: bool = True,
        on_progress: OnProgress | None = None,
        **unknown: Never,
    ) -> None:
        started = time.perf_counter()
        others = {"complete, stream and chat": STREAM_OPTIONS, "chat": CHAT_OPTIONS}
        check_options(unknown, keywords(LLM.__init__), others)
        check_types(LLM.__init__, locals())
        self.warnings: list[str] = []
        backend = select_backend(device, k_before_rope=k_before_rope)
        if k_before_rope:
            check_before_rope(kv_profile, kv_scales)
        if line := unused_gpu(device):
            self.warnings.append(line)
        if fit not in FIT:
            raise unknown_name("unknown fit", fit, FIT)
        for option, value in (
            ("n_batch", n_batch),
            ("n_parallel", n_parallel),
            ("n_cache_tokens", None if n_cache_tokens == "fit" else n_cache_tokens),
            ("n_cache_bytes", n_cache_bytes),
            ("n_threads", n_threads),
            ("n_threads_batch", n_threads_batch),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, not {value}")
        if step_ms is not None and not step_ms > 0:
            raise UsageError(f"step_ms must be above 0, not {step_ms}")
        drafter = spec or ("draft" if draft_model is not None else "none")
        self.speculation = Speculation(drafter, draft_max, draft_min, draft_p_min)
        if self.speculation.is_on and backend.records:
            self.warnings.append(RECORDING_LEFT)
        check_drafter(self.speculation, draft_model)
        place_process(cpus, strict=cpu_strict)
        end_cleanly_from_threads()
        self.gguf = open_gguf(_local_path(path), use_mmap=use_mmap)
        self.config: ModelSpec = checked_spec(self.gguf)
        context = chosen_context(n_ctx, self.config)
        self.warnings += beyond_training(context, self.config)
        cache = CacheConfig(
            cache_type_k or CacheConfig.type_k,
            cache_type_v or CacheConfig.type_v,
            n_ctx=context,
            n_sequences=n_parallel,
            n_tokens=None if n_cache_tokens == "fit" else n_cache_tokens,
            kv_rotation=kv_rotation,
            type_k_swa=cache_type_k_swa,
            type_v_swa=cache_type_v_swa,
            swa_full=swa_full,
            type_k_rope=cache_type_k_rope,
            ctx_checkpoints=ctx_checkpoints,
            checkpoint_min_step=checkpoint_min_step,
            kv_tail=kv_tail,
            kv_sink=kv_sink,
        )
        budgeted = Budgeted.of(kv_budget, kv_ladder)
        budgeted.check(
            types=(cache_type_k, cache_type_v, kv_profile, kv_bits),
            sizes=(n_cache_tokens, n_cache_bytes),
            before_rope=k_before_rope,
        )
        cache = budgeted.cache(cache)
        named = (cache_type_k, cache_type_v, cache_type_k_swa, cache_type_v_swa)
        chosen = chosen_cache(
            self.gguf,
            self.config,
            cache,
            profile=kv_profile,
            bits=kv_bits,
            scales=kv_scales,
            names_types=any(named),
            n_batch=n_batch,
        )
        self.cache, self.kv_types, smoothing = chosen.cache, chosen.types, chosen.smoothing
        self.warnings += chosen.warnings
        check_layers(backend, self.config)
        n_threads = n_threads or default_threads(frozenset(cpus or ()))
        most_threads = max(n_threads, n_threads_batch or 0)
        if cpus is not None and len(set(cpus)) < most_threads:
            self.warnings.append(f"{most_threads} threads share {counted(len(set(cpus)), 'CPU')}")
        use_threads(n_threads, n_threads_batch)
        tensors = tuple(self.gguf.tensors.values())
        memory = ModelMemory(
            tensors,
            self.config,
            backend.name,
            n_batch,
            most_threads,
            is_file=use_mmap,
            changed=changed_tensors(smoothing, self.config, self.gguf.tensors),
        )
        draft = None
        if draft_model is not None:
            types = cache_type_k_draft, cache_type_v_draft
            draft = DraftFile.of(_local_path(draft_model), self.gguf, *types)
            memory = replace(memory, draft=draft.memory(memory))
        self.cache, lines = budgeted.fitted(
            self.cache, memory, lambda: free_memory(backend), names_context=bool(n_ctx)
        )
        self.warnings += lines
        if n_cache_bytes is not None:
            self.cache, lines = cache_in_bytes(memory, self.cache, n_cache_bytes)
            self.warnings += lines
        elif n_cache_tokens == "fit":
            budget = free_memory(backend) if fit == "on" else None
            self.cache, lines = cache_that_fits(memory, self.cache, budget)
            self.warnings += lines
        if fit == "on":
            self._check_fit(memory, backend)
        with (
            uncollected(),
            reporting(printable(self.gguf.path.name), progress, on_progress) as report,
        ):
            loaded = loaded_engine(
                self.gguf,
                self.config,
                backend,
                self.cache,
                n_batch=n_batch,
                exact=exact,
                smoothing=smoothing,
                speculation=self.speculation,
                mlock=mlock,
                use_mmap=use_mmap,
                report=report,
            )
        self.engine = loaded.engine
        self.warnings += loaded.warnings
        if draft is not None:
            self.draft = self._drafting(
                draft,
                device=backend.name,
                n_threads=n_threads,
                n_threads_batch=n_threads_batch,
                n_batch=n_batch,
                use_mmap=use_mmap,
            )
        place_caller()
        self.gguf.check_unchanged()
        self._kernels = dict[str, str]()
        used = tuple(
            info
            for name, info in self.gguf.tensors.items()
            if name not in loaded.unused and not self.config.ignores(name)
        )
        self._memory, self._fit = replace(memory, tensors=used), fit
        self.memory = self._memory.plan(self.cache)
        self.backend = backend
        self._override_pre, self._step_ms = override_pre, step_ms
        self._smoothing, self._k_before_rope = smoothing, k_before_rope
        self.load_seconds = time.perf_counter() - started

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            "a loaded model can't be copied or pickled",
            hint="give its path instead, and load it there: LLM(path)",
        )

    def __repr__(self) -> str:
        if "memory" not in self.__dict__:
            return f"<{type(self).__name__}: not loaded>"
        name, cache = self.config.name or "a model without a name", self.cache
        if "engine" not in self.__dict__:
            return f"<{type(self).__name__} {printable(name)}: closed>"
        draft = f", draft {printable(self.draft.config.name)}" if self.draft else ""
        return (
            f"<{type(self).__name__} {printable(name)}: context {cache.n_ctx}, "
            f"K/V {cache.types_text}, {self.backend.name}{draft}>"
        )

    def _drafting(self, file: DraftFile, **arguments: Any) -> LLM:
        """Load a model that drafts for this one."""
        draft = LLM(
            file.gguf.path,
            n_ctx=file.n_ctx(self.cache.n_ctx),
            cache_type_k=file.cache.type_k,
            cache_type_v=file.cache.type_v,
            exact=False,
            fit="off",  # it was counted before
            progress=False,
            **arguments,
        )
        self.warnings += [f"draft: {line}" for line in draft.warnings]
        self.engine.draft = DraftModel(
            draft.engine.slot, draft.cache.n_ctx, file.n_shared, self.engine.prices
        )
        self.engine.draft.warm_up()
        return draft

    def _check_fit(self, memory: ModelMemory, backend: Backend) -> None:
        """Refuse or warn of a model that does not fit, if free memory is known."""
        budget = free_memory(backend)
        if budget and (warning := check_fit(memory, self.cache, budget)):
            self.warnings.append(warning)

    def check_further_cache(self, cache: CacheConfig) -> None:
        """Refuse another cache for which there is no room now that the model is loaded.

        Raises:
            DoesNotFitError: names settings that would fit.
        """
        budget = free_memory(self.backend)
        if self._fit == "on" and budget:
            # weights are there already
            check_fit(replace(self._memory, tensors=()), cache, budget)


def _local_path(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """`localkv.loader.hub.find.local_path`, which a file does without."""
    if os.path.exists(model):
        return model
    from localkv.loader.hub.find import local_path

    return local_path(model)
