"""A checkpoint to a GGUF file: a plan of its keys and tensors, and the file.

The plan is compared with what localkv reads of such a file, before any weight is read. The
functions that read files (`arch/`, `loader/weights.py`) find a key that is missing or out of its
range. They also find a tensor that is missing, left over or of the wrong shape.

After llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from localkv.arch import checkpoint_of, checkpoints
from localkv.arch.checkpoint import Checkpoint, Config
from localkv.conversion.checkpoint_files import (
    StoredTensor,
    check_folder,
    read_json,
    read_json_list,
    release_pages,
    stored_tensors,
)
from localkv.conversion.quantised import Census, with_codes
from localkv.conversion.vocabulary import add_vocabulary
from localkv.conversion.weights import Values, constant, stacked
from localkv.errors import ModelFileError, counted, printable, quoted
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.gguf_writer import NewTensor, describe, write_gguf
from localkv.loader.metadata import Metadata
from localkv.loader.weights import checked_spec, listed_tensors
from localkv.quant_formats import FORMATS, QuantFormat

OUTTYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
"""Types of a file's matrices, by ggml's `llama_ftype`; `auto` is one of them."""

KEPT = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "mxfp4": 38}
"""Types of matrices whose codes are the checkpoint's."""

NOT_TEXT = re.compile(
    r"^(mlp|vit\.|vpm\.|siglip2\.|conformer\.|merger\.|resampler\.|sound_encoder\.)"
    r"|^(sound_projection\.|speech_embeddings\.)"
    r"|(visual|vision|audio|talker|token2wav|code2wav|projector|connector|patch_merger)\."
    r"|vision_|audio_|pre_mm_projector_norm|image_newline|patch_embed|patch_merge_mlp\."
    r"|\.attention\.(masked_)?bias$|\.rotary_emb\.inv_freq$"
)
"""Tensors that read images and sound, and constants that old checkpoints carry along."""
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
ALWAYS_FLOAT32 = re.compile(
    r"_norm\.weight$"
    r"|\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|shortconv\.conv|indexer\.proj)\.weight$"
    r"|\.(altup_correct_coef|altup_predict_coef)\.weight$"
    r"|^(position_embd|token_types)\.weight$"
)
"""Matrices that no file has in another type, by GGUF's names."""


@dataclass
class Plan:
    """What is to be written.

    Attributes:
        writer: gguf-py's, with all keys and tensors.
        tensors: in the file's order.
        notes: a line each on what the user should know.
        file_name: the name that llama.cpp's converter would give the file.
    """

    writer: gguf.GGUFWriter
    tensors: list[NewTensor]
    notes: list[str] = field(default_factory=list)
    file_name: str = "model.gguf"

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def write(
        self, path: Path, on_bytes: Callable[[NewTensor, int], None] = lambda tensor, n: None
    ) -> None:
        """Write the file; raises as `write_gguf` does, and `ModelFileError` if a value does not
        fit its type."""
        write_gguf(path, self.writer, self.tensors, on_bytes)


def plan_conversion(folder: Path, outtype: str = "auto") -> Plan:
    """What the file of a checkpoint will hold; no weight is read yet.

    Args:
        folder: with config.json, safetensors files and the tokenizer's files.
        outtype: type of the matrices, one of `OUTTYPES`; "auto" for the checkpoint's.

    Raises:
        UsageError: it is no checkpoint's folder.
        ModelFileError: a file is malformed or missing, or the model is not supported.
    """
    for name in ("gguf", "metadata"):  # gguf-py's loggers, which write to stderr
        logging.getLogger(name).setLevel(logging.CRITICAL)
    check_folder(folder)
    values = read_json(folder / "config.json")
    class_name = _class_name(values, folder)
    checkpoint = checkpoint_of(class_name)
    if checkpoint is None:
        raise ModelFileError(
            f"{printable(folder)}: models of the class {quoted(class_name)} can't be converted",
            hint=f"classes that can: {', '.join(sorted(checkpoints()))}",
        )
    tensors = stored_tensors(folder)
    config = Config(values)
    config.n_predicting = _n_predicting(tensors, config) if checkpoint.predicts else 0
    keeps_codes, census = outtype == "auto", Census()
    if outtype == "auto":
        outtype = _usual_type(tensors.values())
    writer = gguf.GGUFWriter(None, checkpoint.architecture)
    release = partial(release_pages, [*{id(t.file): t.file for t in tensors.values()}.values()])
    made = [
        _new_tensor(name, weight, outtype, keeps_codes=keeps_codes, release=release)
        for name, weight in _weights(tensors, config, checkpoint, census)
    ]
    if len(names := {tensor.name for tensor in made}) < len(made):
        twice = next(n for n in names if sum(tensor.name == n for tensor in made) > 1)
        raise ModelFileError(f"{printable(folder)}: two tensors become {quoted(twice)}")
    describe(writer, made)
    metadata = _add_general_keys(writer, folder, checkpoint)
    _add_keys(writer, checkpoint, config)
    if (pooling := _pooling(folder)) is not None:
        writer.add_uint32(f"{checkpoint.architecture}.pooling_type", pooling)
    outtype = _usual(made, outtype) if keeps_codes else outtype
    writer.add_file_type((OUTTYPES | KEPT)[outtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    notes = census.lines() if keeps_codes else []
    notes += add_vocabulary(writer, folder, config, checkpoint)
    notes += _check(writer, made, folder)
    name = gguf.naming_convention(
        metadata.name,
        metadata.basename,
        metadata.finetune,
        metadata.version,
        metadata.size_label,
        outtype.upper(),
    )
    return Plan(writer, made, notes, f"{name}.gguf")


def _class_name(values: dict[str, Any], folder: Path) -> str:
    """The class of the part that reads text."""
    part = values.get("text_config")
    for config in (part if isinstance(part, dict) else {}, values):
        names = config.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
    raise ModelFileError(f"{printable(folder / 'config.json')}: no 'architectures' names its class")


def _usual_type(tensors: Iterable[StoredTensor]) -> str:
    """The 16-bit type that holds the matrices best."""
    usual = {"BF16": "bf16", "F16": "f16"}
    dtypes = (tensor.dtype for tensor in tensors if len(tensor.shape) > 1)
    return next((usual[dtype] for dtype in dtypes if dtype in usual), "f16")


def _weights(
    tensors: dict[str, StoredTensor], config: Config, checkpoint: Checkpoint, census: Census
) -> Iterator[tuple[str, Values]]:
    """The file's tensors by their names there."""
    for name, numbers in checkpoint.added(config).items():
        yield name, constant(numbers)
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        kinds[checkpoint.architecture], config.n_layers + config.n_predicting
    )
    for name, weight in _stacked(_of_text(with_codes(tensors, config, census), config, checkpoint)):
        for part, made in checkpoint.weights(config, name, weight):
            assert isinstance(made, Values)
            found = names.get_name(part, try_suffixes=(".weight", ".bias", ".scale"))
            if found is None:
                raise ModelFileError(
                    f"tensor {quoted(part)} is none of {checkpoint.architecture!r}",
                    hint="a newer model of the same class may differ from those that are known",
                )
            yield found, made


LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")


def _n_predicting(tensors: Iterable[str], config: Config) -> int:
    """Blocks that predict further tokens: the ones after the layers, or in `mtp`."""
    of_mtp = [name for name in tensors if "mtp." in name]
    layers = [int(found[1]) for name in tensors if (found := LAYER.search(name))]
    if of_mtp:
        return 1 + max(int(found[1]) for name in of_mtp if (found := LAYER.search(name)))
    return max(0, 1 + max(layers, default=-1) - config.n_layers)


def _of_text(
    named: Iterable[tuple[str, Values]], config: Config, checkpoint: Checkpoint
) -> Iterator[tuple[str, Values]]:
    n_blocks = config.n_layers + config.n_predicting
    for name, weight in named:
        for old, new in checkpoint.renamed.items():
            name = re.sub(old, new, name)
        name = name.replace("language_model.", "")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        is_left_out = NOT_TEXT.search(name) or name.startswith(checkpoint.left_out or ("\0",))
        layer = LAYER.search(name)
        is_after = layer is not None and int(layer[1]) >= n_blocks
        if not is_left_out and not is_after:
            yield name, weight


def _stacked(named: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, Values]]:
    """Experts' matrices, which checkpoints keep one by one, as one each."""
    experts: dict[str, dict[int, Values]] = {}
    for name, weight in named:
        if (found := EXPERT.match(name)) is None:
            yield name, weight
            continue
        experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = weight
    for name, parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            lost = next(i for i in range(len(parts)) if i not in parts)
            raise ModelFileError(f"{quoted(name)}: expert {lost} is missing")
        yield name, stacked([parts[i] for i in range(len(parts))])


def _usual(tensors: Sequence[NewTensor], outtype: str) -> str:
    """The type of most codes that were kept; else the type of the other matrices."""
    n_bytes = {
        kind: sum(tensor.n_bytes for tensor in tensors if tensor.format.name == kind)
        for kind in KEPT
    }
    kind = max(n_bytes, key=n_bytes.__getitem__)
    return kind if n_bytes[kind] else outtype


def _new_tensor(
    name: str, weight: Values, outtype: str, *, keeps_codes: bool, release: Callable[[], None]
) -> NewTensor:
    is_matrix = len(weight.shape) > 1 and name.endswith(".weight")
    fmt = FORMATS["f32"]
    if is_matrix and not ALWAYS_FLOAT32.search(name):
        fmt = weight.formats[0] if keeps_codes and weight.formats else FORMATS[outtype]
        if weight.shape[-1] % fmt.block_size:
            fmt = FORMATS["f16"]
    return NewTensor(name, weight.shape, fmt, partial(_pieces, name, weight, fmt, release))


def _pieces(
    name: str, weight: Values, fmt: QuantFormat, release: Callable[[], None]
) -> Iterator[NDArray[np.uint8]]:
    try:
        yield from weight.packed(fmt)
        release()
    except ModelFileError as error:
        raise ModelFileError(f"tensor {quoted(name)}: {error.message}", error.hint) from None


def _add_general_keys(
    writer: gguf.GGUFWriter, folder: Path, checkpoint: Checkpoint
) -> gguf.Metadata:
    """Name, size, licence and sampling, by gguf-py's reading of the model card and settings."""
    counts = writer.get_total_parameter_count()
    try:
        metadata = gguf.Metadata.load(None, folder.absolute(), None, counts[0])
        metadata.name = metadata.name or folder.absolute().name
        metadata.size_label = metadata.size_label or gguf.size_label(*counts)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
    except Exception as error:  # whatever YAML and gguf-py make of a strange model card
        raise ModelFileError(
            f"{printable(folder)}: README.md or generation_config.json makes no sense: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None
    return metadata


def _add_keys(writer: gguf.GGUFWriter, checkpoint: Checkpoint, config: Config) -> None:
    keys = checkpoint.keys(config)
    if config.n_predicting:
        keys["block_count"] = config.n_layers + config.n_predicting
        keys["nextn_predict_layers"] = config.n_predicting
    for key, value in keys.items():
        name = f"{checkpoint.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif not 0 <= value < 1 << 32:
            raise ModelFileError(f"config.json: {key} is {value}")
        else:
            writer.add_uint32(name, value)


POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}
"""`pooling_type` by sentence-transformers' names."""


def _pooling(folder: Path) -> int | None:
    """How a text's vectors become one, as sentence-transformers' files say.

    Raises:
        ModelFileError: in a way that GGUF files don't know.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = read_json_list(path)
    parts = [m.get("path") for m in modules if str(m.get("type", "")).endswith("Pooling")]
    part = next((p for p in parts if isinstance(p, str) and p == Path(p).name), None)
    if part is None:
        return None
    settings = read_json(folder / part / "config.json")
    for name, number in POOLINGS.items():
        flag = "mean_tokens" if name == "mean" else "cls_token" if name == "cls" else name
        if settings.get(f"pooling_mode_{flag}") or settings.get("pooling_mode") == name:
            return number
    raise ModelFileError(f"{printable(folder / part)}: its way of pooling is not supported")


@dataclass(frozen=True)
class _Header:
    """The header of the file, as those see it that read files."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def _check(writer: gguf.GGUFWriter, tensors: Sequence[NewTensor], folder: Path) -> list[str]:
    """Read the header as a model's is read.

    Returns:
        a line on tensors that nobody reads.

    Raises:
        ModelFileError: localkv can't run the model.
    """
    values = {key: value.value for key, value in writer.kv_data[0].items()}
    infos = {
        tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.format, tensor.n_bytes, 0, 0)
        for tensor in tensors
    }
    header = _Header(folder, Metadata(values, printable(folder)), infos)
    spec = checked_spec(header)
    read = {name for name, _ in listed_tensors(spec, infos.__contains__)}
    left = [name for name in infos if name not in read and not spec.ignores(name)]
    if not left:
        return []
    return [f"{counted(len(left), 'tensor')} without a use, such as {quoted(left[0])}"]
