"""The model that a user names in a chat: its file, and whether an engine could load it.

All of it is found out from headers. So a chat lets its engine go only for a model that there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localkv.cache.cache_checks import check_cache
from localkv.cache.layout import group_layouts
from localkv.cache.profile import (
    DEFAULT_BITS,
    check_scales,
    profiled,
    read_kv_scales,
    require_scales,
)
from localkv.chat.engine import EngineOptions
from localkv.chat.server_engine import ServerEngine, is_url
from localkv.chat.store import SessionCache
from localkv.config import USUAL_PAIRS, CacheConfig, Overrides
from localkv.errors import LocalKVError, ModelFileError, UsageError, printable
from localkv.loader.adapter_file import adapter_memory, opened_adapters
from localkv.loader.chat_template import chat_template_from_metadata
from localkv.loader.chosen_cache import AUTO, model_profile, profile_path
from localkv.loader.gguf_file import open_gguf
from localkv.loader.hub.find import find_cached
from localkv.loader.hub.reference import HubReference, parse_reference
from localkv.loader.local_models import local_models
from localkv.loader.model_header import ModelHeader, with_overrides
from localkv.loader.smoothing import Smoothing, changed_tensors
from localkv.loader.vocabulary import read_vocabulary
from localkv.loader.weights import checked_spec
from localkv.memory.draft_file import DraftFile
from localkv.memory.fit import Budgeted, check_fit
from localkv.memory.plan import ModelMemory
from localkv.quant_formats import KV_FORMATS
from localkv.system.machine_memory import machine_memory, process_bytes
from localkv.system.threads import default_threads

__all__ = ["Models", "OfferedModel", "memory_of"]


@dataclass(frozen=True)
class OfferedModel:
    """A model that a chat can go over to.

    Attributes:
        name: what the user sees, and may type.
        model: its file, or a server's address with its name.
        n_bytes: of its files; 0 on a server.
        state: of a server's model; empty for a file.
    """

    name: str
    model: str
    n_bytes: int = 0
    state: str = ""


class Models:
    """The models that a chat can go over to.

    Args:
        api_key: for a server that wants one.

    Attributes:
        beside: the open file, whose folder is listed, too; or a server's address.
    """

    def __init__(self, api_key: str | None = None) -> None:
        self.beside = ""
        self._api_key = api_key

    def all(self) -> list[OfferedModel]:
        """A server's models, if the chat has one; then the models on this machine, with the open
        model's folder first."""
        is_file = self.beside and not is_url(self.beside)
        files = local_models(Path(self.beside) if is_file else None)
        offered = [OfferedModel(one.name, str(one.path), one.n_bytes) for one in files]
        return [*self._on_server(), *offered]

    def _on_server(self) -> list[OfferedModel]:
        """The models of the chat's server; none if it has no server, or one that fails."""
        if not is_url(self.beside):
            return []
        server = ServerEngine(self.beside, self._api_key)
        with suppress(LocalKVError):
            return [
                OfferedModel(one.name, server.address_of(one), state=one.state or "there")
                for one in server.models()
            ]
        return []

    def with_context(
        self, options: EngineOptions, had: SessionCache, *, names_types: bool
    ) -> EngineOptions | None:
        """The options with a session's former context, if they choose none; None if that is no
        larger than the context of the options.

        Args:
            options: the model, and how it would be loaded.
            had: what the session ran with.
            names_types: the options choose types; if not, the session's types are taken.

        Raises:
            ModelFileError: the file can't be used.
        """
        arguments = options.arguments
        if had.n_ctx is None or arguments.get("n_ctx") is not None or arguments.get("kv_budget"):
            return None
        gguf = with_overrides(open_gguf(options.model), Overrides.of(arguments))
        n_trained = checked_spec(gguf).n_ctx_train
        n_ctx = had.n_ctx
        if Path(had.model).name != Path(options.model).name:
            n_ctx = min(n_ctx, n_trained)
        if n_ctx <= min(CacheConfig.n_ctx, n_trained):
            return None
        changed: dict[str, Any] = {"n_ctx": n_ctx}
        if had.type_k and had.type_v and not names_types:
            changed |= {"cache_type_k": had.type_k, "cache_type_v": had.type_v}
        return replace(options, arguments={**arguments, **changed})

    def find(self, name: str) -> str:
        """The file that a name means: a path, or a model as `localkv list` shows it. The name of
        one of the server's models means the server's address with that name.

        The name of a file is enough, with or without ".gguf". Nothing is fetched.

        Raises:
            ModelFileError: there is none, or there are several.
        """
        # not Path's: they raise for unknown users and for names that are too long
        path = os.path.expanduser(name)
        if is_url(name) or os.path.exists(path):
            return path
        offered = [model for model in self.all() if _means(name, model)]
        for model in offered:
            if model.state:
                return model.model
        found = {Path(model.model).resolve(): model for model in offered}
        if len(found) > 1:
            names = ", ".join(printable(model.name) for model in found.values())
            raise ModelFileError(
                f"{printable(name)} could mean several models", hint=f"one of {names}"
            )
        for model in found.values():
            return model.model
        reference = _reference(name)
        if reference is None:
            hint = "/model alone lists the models on this machine"
            raise ModelFileError(f"{printable(name)}: no such file", hint=hint)
        if cached := find_cached(reference):
            return str(cached.path)
        raise ModelFileError(
            f"{printable(name)} is not on this machine", hint=f"localkv pull {name} fetches it"
        )

    def completions(self, text: str) -> list[str]:
        """Names that begin with `text`: models on this machine, then folders and GGUF files."""
        names = [model.name for model in self.all() if model.name.startswith(text)]
        return list(dict.fromkeys([*names, *_paths(text)]))

    def carried_over(self, options: EngineOptions, model: Path) -> EngineOptions:
        """The options of one model for another.

        A KV profile belongs to one model, so the other's takes its place; where it has none, all
        layers get a usual pair of at most as many bits.
        """
        arguments = dict(options.arguments)
        if "kv_profile" in arguments and not model.samefile(options.model):
            if profile_path(model) is not None:
                arguments["kv_profile"] = AUTO
            else:
                del arguments["kv_profile"]
                bits = arguments.pop("kv_bits", None) or DEFAULT_BITS
                if arguments.get("cache_type_k") is None:
                    pair = _pair_within(bits)
                    arguments |= {"cache_type_k": pair[0], "cache_type_v": pair[1]}
        return replace(options, model=str(model), arguments=arguments)

    def check(
        self, options: EngineOptions, *, backend: str | None = None, running_pid: int | None = None
    ) -> None:
        """Find out whether an engine could load a model.

        Args:
            options: the model, and how it would be loaded.
            backend: where engines run; None if that is not known, as long as none was loaded.
            running_pid: the process of the engine whose memory will be free by then.

        Raises:
            ModelFileError: the file can't be used.
            UsageError: the model can't have this cache, or has no chat template.
            DoesNotFitError: there is not enough memory.
        """
        if is_url(options.model):
            return  # the server finds out
        arguments = options.arguments
        header = with_overrides(open_gguf(options.model), Overrides.of(arguments))
        if options.chat_template is None and chat_template_from_metadata(header.metadata) is None:
            raise UsageError(
                f"{printable(Path(options.model).name)} has no chat template",
                hint="start the chat with --chat-template-file, or continue plain text with: "
                "localkv complete",
            )
        read_vocabulary(header.metadata)
        memory, cache = memory_of(header, arguments, backend or "cpu")
        if backend != "cpu" or arguments.get("fit") == "off":
            return  # the engine finds out
        budget = machine_memory()
        if budget is not None:
            freed = process_bytes(running_pid) if running_pid is not None else 0
            check_fit(memory, cache, replace(budget, n_bytes=budget.n_bytes + freed))


def _pair_within(bits: float) -> tuple[str, str]:
    """The first usual types of at most `bits` bits per value, or the last if none fits."""

    def bits_of(pair: tuple[str, str]) -> float:
        formats = [KV_FORMATS[name] for name in pair]
        return sum(8 * fmt.block_bytes / fmt.block_size for fmt in formats) / 2

    return next((pair for pair in USUAL_PAIRS if bits_of(pair) <= bits), USUAL_PAIRS[-1])


def _means(name: str, model: OfferedModel) -> bool:
    file = Path(model.model)
    return name in ((model.name,) if model.state else (model.name, file.name, file.stem))


def _reference(name: str) -> HubReference | None:
    """The model on Hugging Face that a name could mean, if it doesn't look like a path."""
    if name.startswith(("/", ".", "~")) or (name.endswith(".gguf") and name.count("/") < 2):
        return None
    with suppress(UsageError):
        return parse_reference(name)
    return None


def _paths(text: str) -> list[str]:
    head, tail = os.path.split(text)
    found = []
    try:
        with os.scandir(os.path.expanduser(head or ".")) as entries:
            for entry in entries:
                if entry.name.startswith(tail) and (tail or not entry.name.startswith(".")):
                    if entry.is_dir():
                        found.append(os.path.join(head, entry.name, ""))
                    elif entry.name.lower().endswith(".gguf"):
                        found.append(os.path.join(head, entry.name))
    except (OSError, ValueError):
        return []
    return sorted(name for name in found if name.isprintable())


def memory_of(
    header: ModelHeader, arguments: Mapping[str, Any], backend: str
) -> tuple[ModelMemory, CacheConfig]:
    """What a model and a cache take, if the model can have such a cache.

    Args:
        header: the model's file.
        arguments: of `LLM`; the cache has no bound that is chosen when it is loaded.
        backend: where it would run.

    Raises:
        ModelFileError: the file, or that of a draft model, can't be used.
        UsageError: the model can't have this cache.
    """
    config = checked_spec(header)
    named = [arguments.get(f"cache_type_{side}") for side in ("k", "v", "k_swa", "v_swa")]
    type_k, type_v = (name or "f16" for name in named[:2])
    n_ctx = arguments.get("n_ctx")
    cache = CacheConfig(
        type_k,
        type_v,
        type_k_swa=arguments.get("cache_type_k_swa"),
        type_v_swa=arguments.get("cache_type_v_swa"),
        swa_full=arguments.get("swa_full", False),
        type_k_rope=arguments.get("cache_type_k_rope") or CacheConfig.type_k_rope,
        ctx_checkpoints=arguments.get("ctx_checkpoints", CacheConfig.ctx_checkpoints),
        n_sequences=arguments.get("n_parallel", 1),
        kv_tail=arguments.get("kv_tail"),
        kv_sink=arguments.get("kv_sink"),
        n_ctx=min(config.n_ctx_train, CacheConfig.n_ctx) if n_ctx is None else n_ctx,
        kv_rotation=arguments.get("kv_rotation") or "auto",
    )
    budgeted = Budgeted.of(arguments.get("kv_budget"), arguments.get("kv_ladder"))
    cache = budgeted.cache(cache, config)
    profile = arguments.get("kv_profile")
    if profile is not None:
        gguf = with_overrides(open_gguf(header.path), Overrides.of(arguments))
        profile = model_profile(gguf, profile)
    if cache.n_ctx == 0:
        cache = replace(cache, n_ctx=config.n_ctx_train)
    n_batch = arguments.get("n_batch") or 512
    chosen = profiled(
        cache,
        profile,
        arguments.get("kv_bits"),
        names_types=any(named),
        groups=config.groups,
        n_batch=n_batch,
    )
    cache = chosen.cache
    check_cache(cache, config.groups)
    given = arguments.get("kv_scales")
    require_scales(cache.types, given is not None or chosen.scales is not None)
    scales = chosen.scales if given is None else read_kv_scales(given)
    cache = replace(cache, kv_scales=scales)
    group_layouts(cache, config.groups)
    check_scales(cache, config)
    tensors = tuple(header.tensors.values())
    n_threads = arguments.get("n_threads") or default_threads()
    n_threads = max(n_threads, arguments.get("n_threads_batch") or 0)
    memory = ModelMemory(
        tensors,
        config,
        backend,
        n_batch,
        n_threads,
        is_file=arguments.get("use_mmap", True),
        changed=changed_tensors(Smoothing.in_use(cache, profile), config, header.tensors),
        activations=arguments.get("activations") or "auto",
    )
    if (lora := arguments.get("lora")) is not None:
        files = [file for file, _ in opened_adapters(lora, header, config, backend)]
        memory = replace(memory, adapters=adapter_memory(files, config))
    if (path := arguments.get("draft_model")) is not None:
        types = (arguments.get(f"cache_type_{side}_draft", "f16") for side in "kv")
        memory = replace(memory, draft=DraftFile.of(path, header, *types).memory(memory))
    cache, _ = budgeted.fitted(cache, memory, machine_memory, names_context=bool(n_ctx))
    return memory, cache
