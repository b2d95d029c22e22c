"""Writes a model as GGUF: architecture `llama` or `qwen35`, in F16 and Q8_0 or in Q8_0 alone.

Run as a program, it exports a checkpoint: `python models/export_gguf.py --work DIR --out models`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from document import ASSISTANT, SYSTEM, USER
from hybrid import AnyNetwork, HybridShape, new_network, shape_of
from network import Shape
from tokenizer import Tokenizer
from torch import Tensor

DESCRIPTIONS = {
    "tales-4M": "A very small model that tells short stories about animals and remembers facts. "
    "Trained from nothing on generated text; its attention heads were preset before training.",
    "tales-draft": "A still smaller model that drafts tokens for tales-4M, whose tokenizer it has. "
    "Trained from nothing on the same text; its attention heads were preset before training.",
    "tales-hybrid": "A very small model of gated delta nets and attention, with a block that "
    "predicts a further token. Trained from nothing on the text of tales-4M.",
}
TYPES = {"tales-4M": ("F16", "Q8_0"), "tales-draft": ("Q8_0",), "tales-hybrid": ("Q8_0",)}
"""By model, the types of matrices that there are files of."""
LICENSE = "MIT"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] == 'system' %}"
    "{{ '" + SYSTEM + "' + message['content'] | trim }}"
    "{% else %}"
    "{{ '" + USER + "' + message['content'] | trim }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)
_FORMATS = {
    "F16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "Q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}


def export(
    network: AnyNetwork, tokenizer: Tokenizer, folder: Path, name: str = "tales-4M"
) -> list[Path]:
    """Write one file per format and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for suffix in TYPES[name]:
        file_type, matrix_type = _FORMATS[suffix]
        path = folder / f"{name}-{suffix}.gguf"
        shape = network.shape
        writer = gguf.GGUFWriter(path, "qwen35" if isinstance(shape, HybridShape) else "llama")
        _add_model(writer, shape, file_type, name)
        if isinstance(shape, HybridShape):
            _add_hybrid(writer, shape)
        _add_tokenizer(writer, tokenizer)
        _add_tensors(writer, network, matrix_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def _add_model(
    writer: gguf.GGUFWriter, shape: Shape, file_type: gguf.LlamaFileType, name: str
) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_description(DESCRIPTIONS[name])
    writer.add_license(LICENSE)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers + isinstance(shape, HybridShape))
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_vocab_size(shape.vocabulary)


def _add_hybrid(writer: gguf.GGUFWriter, shape: HybridShape) -> None:
    """What a model has that is not attention alone; its last block is the head."""
    third = shape.head_width // 6
    writer.add_rope_dimension_sections([third + 1, third, shape.head_width // 2 - 2 * third - 1, 0])
    writer.add_nextn_predict_layers(1)
    writer.add_full_attention_interval(shape.interval)
    writer.add_ssm_conv_kernel(shape.kernel)
    writer.add_ssm_inner_size(shape.state_heads * shape.head_width)
    writer.add_ssm_state_size(shape.head_width)
    writer.add_ssm_time_step_rank(shape.state_heads)
    writer.add_ssm_group_count(shape.state_heads)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    processor = tokenizer.processor
    pieces = range(tokenizer.size)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(index) for index in pieces])
    writer.add_token_scores([processor.get_score(index) for index in pieces])
    writer.add_token_types([_token_type(tokenizer, index) for index in pieces])
    writer.add_bos_token_id(tokenizer.bos)
    writer.add_eos_token_id(tokenizer.eos)
    writer.add_unk_token_id(processor.unk_id())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _token_type(tokenizer: Tokenizer, index: int) -> gguf.TokenType:
    processor = tokenizer.processor
    if processor.is_unknown(index):
        return gguf.TokenType.UNKNOWN
    if processor.is_control(index):
        return gguf.TokenType.CONTROL
    if processor.is_byte(index):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL


def _add_tensors(
    writer: gguf.GGUFWriter, network: AnyNetwork, matrix_type: gguf.GGMLQuantizationType
) -> None:
    for name, weight in network.state_dict().items():
        name, weight = _of_file(name, weight.detach().float())
        values = weight.numpy()
        if values.ndim == 1 or "conv1d" in name:
            writer.add_tensor(name, values.astype(np.float32))
        elif matrix_type == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            packed = gguf.quants.quantize(values, matrix_type)
            writer.add_tensor(name, packed, raw_dtype=matrix_type)


def _of_file(name: str, weight: Tensor) -> tuple[str, Tensor]:
    """A tensor as the file has it, where that differs."""
    if name.endswith(".log_rate"):
        return name.replace("log_rate", "ssm_a"), -weight.exp()
    if name.endswith(".ssm_dt"):
        return f"{name}.bias", weight
    return name, weight.squeeze(1) if "conv1d" in name else weight


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a checkpoint as GGUF.")
    parser.add_argument("--work", type=Path, required=True, help="folder with the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=TYPES, default="tales-4M")
    options = parser.parse_args()
    state = torch.load(options.work / "checkpoint.pt", weights_only=True)
    network = new_network(shape_of(state["shape"]))
    network.load_state_dict(state["network"])
    for path in export(
        network, Tokenizer(options.work / "tokenizer.model"), options.out, options.model
    ):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
