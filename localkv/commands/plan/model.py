"""The model that `plan` is asked about, a header's or a shape, and the types a profile gives it."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from localkv.cache.layout import (
    allocated_bits,
    bytes_of,
    group_layouts,
    in_words,
    read_rows,
    with_one_pair,
)
from localkv.cache.profile import with_profile_types
from localkv.commands.loading_options import override_flags
from localkv.commands.model_file import model_header
from localkv.commands.options import PLAN
from localkv.commands.output import note, table, warn
from localkv.config import Overrides
from localkv.errors import LocalKVError, UsageError, byte_size, printable

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.cache.profile import KVProfile, TypeList
    from localkv.config import CacheConfig
    from localkv.loader.chosen_cache import KVRisk
    from localkv.loader.gguf_header import TensorInfo
    from localkv.loader.model_header import ModelHeader
    from localkv.memory.plan import MemoryPlan, ModelMemory
    from localkv.system.machine_memory import Budget


@dataclass(frozen=True)
class PlannedModel:
    """A model as far as its header tells.

    Attributes:
        path: the file, its name in a repository, or SHAPE:TYPE.
        config, tensors: its sizes, and all tensors.
        quant: the type of most weights.
        risks: its known weaknesses with packed caches.
        has_template: it can be talked with.
        header: of the file; None if there is only a shape.
    """

    path: str
    config: ModelSpec
    tensors: tuple[TensorInfo, ...]
    quant: str
    risks: list[KVRisk]
    has_template: bool
    header: ModelHeader | None = None

    @property
    def is_shape(self) -> bool:
        return self.header is None


def header_model(values: Mapping[str, Any], file: str | None) -> PlannedModel:
    """The model of a file, here or on the hub.

    Raises:
        ModelFileError: it can't be run; the known facts about its cache are printed first.
        UsageError: it is an encoder.
    """
    from localkv.loader.chosen_cache import kv_risks
    from localkv.loader.metadata import file_type_name
    from localkv.loader.model_header import with_overrides
    from localkv.loader.weights import checked_spec
    from localkv.memory.plan import weights_by_type

    header = model_header(values, argument=file)
    try:
        header = with_overrides(header, Overrides.of(values))
        config = checked_spec(header)
    except LocalKVError:
        for risk in kv_risks(header):
            warn(risk.reason)
        raise
    if config.is_encoder:
        raise UsageError(
            f"a {config.architecture} model is an encoder, which has no KV cache to plan",
            hint="localkv embed says what memory it takes",
        )
    tensors = tuple(header.tensors.values())
    quant = file_type_name(header.metadata) or weights_by_type(tensors)[0].name
    return PlannedModel(
        str(header.path),
        config,
        tensors,
        quant,
        kv_risks(header, config),
        "tokenizer.chat_template" in header.metadata,
        header,
    )


def with_draft(memory: ModelMemory, model: PlannedModel, values: Mapping[str, Any]) -> ModelMemory:
    """The memory with a model that drafts.

    Raises:
        ModelFileError: its file can't be used.
        UsageError: there is no file whose tokens it could have, or it has others.
    """
    from localkv.memory.draft_file import DraftFile

    if model.header is None:
        raise UsageError("-md drafts for a model in a file", hint="leave out --synthetic")
    types = values["cache_type_k_draft"], values["cache_type_v_draft"]
    draft = DraftFile.of(values["draft_model"], model.header, *types)
    return replace(memory, draft=draft.memory(memory))


def with_adapters(
    memory: ModelMemory, model: PlannedModel, lora: Mapping[str, float]
) -> ModelMemory:
    """The memory with LoRA adapters: files, and their scales.

    Raises:
        ModelFileError: a file can't be used.
        UsageError: there is no file that it could change, or not on this device.
    """
    from localkv.loader.adapter_file import adapter_memory, opened_adapters

    if model.header is None:
        raise UsageError("--lora changes a model in a file", hint="leave out --synthetic")
    files = opened_adapters(lora, model.header, model.config, memory.backend)
    return replace(memory, adapters=adapter_memory([file for file, _ in files], model.config))


def synthetic_model(name: str) -> PlannedModel:
    """The model of SHAPE:TYPE.

    Raises:
        UsageError: there is no such shape, or no such type.
    """
    from localkv.loader.known_models import KNOWN_MODELS, shape_and_type, shape_tensors

    shape, type_name = shape_and_type(name)
    tensors = shape_tensors(shape, type_name)
    return PlannedModel(name, KNOWN_MODELS[shape].spec, tensors, type_name, [], False)


def model_flags(values: Mapping[str, Any], model: PlannedModel) -> list[str]:
    """The flags that name the models and the place where they run."""
    from localkv.config import CacheConfig

    if model.is_shape:
        return []
    flags = ["-m", model.path]
    if values["hf_repo"] is not None:
        flags = ["-hf", values["hf_repo"]]
        flags += ["-hff", values["hf_file"]] if values["hf_file"] else []
    elif "://" in (values["model"] or "") or not os.path.exists(model.path):
        flags = ["-m", values["model"] or model.path]
    if values["device"] != "auto":
        flags += ["--device", values["device"]]
    if values["activations"] != "auto":
        flags += ["--activations", values["activations"]]
    for flag, joined in (("--lora", values["lora"]), ("--lora-scaled", values["lora_scaled"])):
        for item in joined:
            flags += [flag, item]
    if values["draft_model"] is not None:
        flags += ["-md", values["draft_model"]]
        for flag, name in (("-ctkd", "cache_type_k_draft"), ("-ctvd", "cache_type_v_draft")):
            flags += [flag, values[name]] if values[name] != CacheConfig.type_k else []
    return flags + override_flags(values)


_AUTO = "auto"
HOW = "localkv calibrate -m MODEL measures which layers need which types"


def max_kld_option() -> click.Parameter:
    """`--max-kld`."""
    return PLAN.option(
        "--max-kld",
        type=click.FloatRange(0, min_open=True),
        metavar="X",
        help="The fewest bytes, by layer, whose predictions diverge from those with f16 by at most "
        "X nats on average, from the model's KV profile (localkv calibrate).",
    )


@dataclass(frozen=True)
class LayerFit:
    """Types by layer, and a budget.

    Attributes:
        types: the profile's.
        tail: tokens of the tail that a cache has with them, as it is asked for.
        plan: the memory with the requested context.
        fits: all of it.
        used_context: tokens of the context if that fits, else of the longest that does.
        bits: per value in that one, with the tail and the sink.
        longest: tokens of the longest context that fits; 0 for none.
        token_ms: of a token with the whole context before it, as the machine that measured has it.
    """

    types: TypeList
    tail: int
    plan: MemoryPlan
    fits: bool
    used_context: int
    bits: float
    longest: int
    token_ms: float

    @property
    def n_bytes(self) -> int:
        """The bytes of K and V in the context."""
        return self.plan.cache_k + self.plan.cache_v

    @property
    def asked_bits(self) -> float:
        """`bits` as a command line asks for them."""
        return math.ceil(1000 * self.bits - 1e-6) / 1000


@dataclass(frozen=True)
class ProfilePlan:
    """What a profile has for a request.

    Attributes:
        name: of the profile, as `--kv-profile` takes it.
        rows: from the most bytes of K and V to the fewest, without those that others or f16 beat.
        chosen: None if none is good enough, or none fits.
        reason: why, in one line.
        n_ctx: tokens of context.
    """

    name: str
    rows: list[LayerFit]
    chosen: LayerFit | None
    reason: str
    n_ctx: int

    def lines(self, model_flags: list[str], row_flags: list[str], command: str) -> list[str]:
        """The plan as it is printed.

        Args:
            model_flags: flags that name the model.
            row_flags: flags for rows that are kept as f16.
            command: the command that the model is for.
        """
        rows = [("bits", "tail", "per token", "K + V", "KLD predicted", "verified", "ms/token",
                 "fits", "longest context")]  # fmt: skip
        rows += [
            (
                f"{row.types.bits:.4g}",
                str(row.tail),
                byte_size(row.types.bytes_per_token),
                byte_size(row.n_bytes),
                f"{row.types.predicted:.2e}",
                f"{row.types.verified:.2e}",
                f"{row.token_ms:.3g}",
                "yes" if row.fits else "no",
                str(row.longest) if row.longest else "none",
            )
            for row in self.rows
        ]
        name = "the model's KV profile"
        if self.name != _AUTO:
            name = f"the KV profile {printable(self.name)}"
        found = [
            "",
            f"Types by layer, from {name} (ms per token with "
            f"{self.n_ctx} tokens before it, where it was measured):",
            *table(rows),
            f"by layer: {self.reason}",
        ]
        if self.chosen is None:
            return found
        bits = self.chosen.asked_bits
        found.append(f"K/V: {in_words(self.chosen.types.layers)}")
        n_ctx = self.n_ctx if self.chosen.fits else self.chosen.longest
        if not n_ctx:
            return found
        flags = ["-c", str(n_ctx), "--kv-profile", self.name, "--kv-bits", f"{bits:g}", *row_flags]
        return [*found, f"localkv {command} {shlex.join([*model_flags, *flags])}"]

    def json(self) -> dict[str, Any]:
        """Its part of `--json`."""
        return {
            "path": self.name,
            "reason": self.reason,
            "bits": self.chosen and self.chosen.types.bits,
            "lists": [
                {
                    "bits": row.types.bits,
                    "kv_tail": row.types.kv_tail,
                    "kv_sink": row.types.kv_sink,
                    "bits_with_tail": row.bits,
                    "bytes_per_token": row.types.bytes_per_token,
                    "cache_k": row.plan.cache_k,
                    "cache_v": row.plan.cache_v,
                    "total": row.plan.total,
                    "kld_predicted": row.types.predicted,
                    "kld_verified": row.types.verified,
                    "ms_per_token": row.token_ms,
                    "fits": row.fits,
                    "longest_context": row.longest,
                    "layers": [pair and "/".join(pair) for pair in row.types.layers],
                }
                for row in self.rows
            ],
        }


def asked_profile(values: Mapping[str, Any], model: PlannedModel) -> KVProfile | None:
    """The model's profile, if options ask for what is in it; a note tells if there is none.

    Raises:
        UsageError: `--max-kld` or `--kv-profile` needs one and there is none, or it is damaged or
            of another model.
    """
    from localkv.loader.chosen_cache import find_profile, model_profile
    from localkv.loader.gguf_file import open_gguf
    from localkv.loader.model_header import with_overrides

    name, most = values["kv_profile"], values["max_kld"]
    if name is None and most is None and values["memory"] is None:
        return None
    if model.is_shape or not os.path.exists(model.path):
        if name is not None or most is not None:
            flag = "--max-kld" if name is None else "--kv-profile"
            raise UsageError(
                f"{flag} needs the model itself, not only its header",
                hint="localkv pull fetches it",
            )
        return None
    gguf = with_overrides(open_gguf(model.path), Overrides.of(values))
    if name is None and find_profile(gguf) is None and most is None:
        note(f"there is no KV profile of this model: {HOW}")
        return None
    return model_profile(gguf, name or _AUTO)


def smoothed_memory(memory: ModelMemory, profile: KVProfile | None) -> ModelMemory:
    """The memory of a model that is loaded with a profile: what smoothing changes is copied."""
    if profile is None or not profile.smoothing_name:
        return memory
    from localkv.loader.smoothing import Smoothing, changed_tensors

    names = [tensor.name for tensor in memory.tensors]
    changed = changed_tensors(Smoothing.of_profile(profile), memory.config, names)
    return replace(memory, changed=changed)


def profile_plan(
    values: Mapping[str, Any],
    profile: KVProfile,
    memory: ModelMemory,
    cache: CacheConfig,
    budget: Budget,
) -> ProfilePlan:
    """What a profile has for a request; `memory` is as `smoothed_memory` has it."""
    profile = profile.measured_with(cache.kv_tail, cache.kv_sink)
    f16 = memory.plan(replace(with_one_pair(cache, "f16", "f16"), kv_tail=None, kv_sink=None))
    fits = [_fit(one, profile, memory, cache, budget) for one in profile.lists]
    fits = [one for one in fits if _is_taken(one, profile, memory, cache)]
    rows = _useful([one for one in fits if one.n_bytes < f16.cache_k + f16.cache_v])
    if not rows:
        least = byte_size(min(one.n_bytes for one in fits))
        rows, chosen = _useful(fits), None
        reason = f"in {cache.n_ctx} tokens f16 takes no more than these, {least} at least"
    else:
        chosen, reason = _choice(rows, cache, budget, values["max_kld"])
    return ProfilePlan(str(values["kv_profile"] or _AUTO), rows, chosen, reason, cache.n_ctx)


def _useful(rows: list[LayerFit]) -> list[LayerFit]:
    """The rows that diverge less than all rows of no more bytes, from the most bytes on.

    In a short context, types with a tail take more than larger types without one.
    """
    kept = list[LayerFit]()
    for row in sorted(rows, key=lambda row: (row.n_bytes, row.types.verified)):
        if not kept or row.types.verified < kept[-1].types.verified:
            kept.append(row)
    return kept[::-1]


def _is_taken(row: LayerFit, profile: KVProfile, memory: ModelMemory, cache: CacheConfig) -> bool:
    """Whether a cache of as many bits gets these types. Bits count all layers alike, and bytes
    those less that have a window, so that others may diverge less in fewer bits but more bytes."""
    used = replace(cache, n_ctx=row.used_context)
    groups, n_batch = memory.config.groups, memory.n_batch

    def takes(one: TypeList) -> float:
        return allocated_bits(with_profile_types(used, one), groups, n_batch)

    return profile.within(row.asked_bits, takes) is row.types


def _fit(
    types: TypeList, profile: KVProfile, memory: ModelMemory, cache: CacheConfig, budget: Budget
) -> LayerFit:
    asked = with_profile_types(cache, types)
    plan = memory.plan(asked)
    layouts = group_layouts(asked, memory.config.groups)
    read = sum(bytes_of(layout, read_rows(layout, cache.n_ctx - 1, 1)) for layout in layouts)
    tail = max(layout.packed.tail.newest if layout.packed.tail else 0 for layout in layouts)
    seconds = profile.token_seconds + (read / profile.bandwidth if profile.bandwidth else 0.0)
    longest = memory.longest_context(asked, budget.n_bytes)
    fits = plan.total <= budget.n_bytes
    used = cache.n_ctx if fits or not longest else longest
    bits = allocated_bits(replace(asked, n_ctx=used), memory.config.groups, memory.n_batch)
    return LayerFit(types, tail, plan, fits, used, bits, longest, 1000 * seconds)


def _choice(
    rows: list[LayerFit], cache: CacheConfig, budget: Budget, most: float | None
) -> tuple[LayerFit | None, str]:
    """The one to take, and why; of `rows` from the most bytes to the fewest."""
    if most is not None:
        good = [row for row in rows if row.types.verified <= most]
        if not good:
            least = min(row.types.verified for row in rows)
            return None, f"none diverges by at most {most:g}; the least is {least:.2e}"
        fewest = good[-1]
        room = "" if fewest.fits else f"; {fewest.longest or 'no'} tokens fit"
        return fewest, f"the fewest bytes with a KLD of at most {most:g}{room}"
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None, f"{cache.n_ctx} tokens fit in none"
    best = min(fitting, key=lambda row: row.types.verified)
    left = byte_size(budget.n_bytes - best.plan.total)
    return best, f"the least divergence that {cache.n_ctx} tokens have room for, with {left} left"
