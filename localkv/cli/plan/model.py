"""The model that `plan` is asked about: a header's, or a shape."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localkv.cli.model.file import model_header
from localkv.cli.output.messages import warn
from localkv.errors import LocalKVError, UsageError

if TYPE_CHECKING:
    from localkv.arch.spec import ModelSpec
    from localkv.loader.gguf_header import TensorInfo
    from localkv.loader.kv_risks import KVRisk
    from localkv.loader.model_header import ModelHeader
    from localkv.memory.plan import ModelMemory


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
    """
    from localkv.loader.kv_risks import kv_risks
    from localkv.loader.listed_tensors import checked_spec
    from localkv.loader.model_summary import file_type_name
    from localkv.memory.weight_bytes import weights_by_type

    header = model_header(values, argument=file)
    try:
        config = checked_spec(header)
    except LocalKVError:
        for risk in kv_risks(header):
            warn(risk.reason)
        raise
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
    """The same with a model that drafts.

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


def synthetic_model(name: str) -> PlannedModel:
    """The model of SHAPE:TYPE.

    Raises:
        UsageError: there is no such shape, or no such type.
    """
    from localkv.loader.shapes import SHAPES, shape_and_type, shape_tensors

    shape, type_name = shape_and_type(name)
    tensors = shape_tensors(shape, type_name)
    return PlannedModel(name, SHAPES[shape], tensors, type_name, [], False)


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
    if values["draft_model"] is not None:
        flags += ["-md", values["draft_model"]]
        for flag, name in (("-ctkd", "cache_type_k_draft"), ("-ctvd", "cache_type_v_draft")):
            flags += [flag, values[name]] if values[name] != CacheConfig.type_k else []
    return flags
