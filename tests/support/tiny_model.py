"""A complete model file of some 650 KiB: a random Llama with a trained tokenizer and a template.

It speaks nonsense, but every part of a real file is there: SentencePiece tokens with byte fallback,
control tokens, BOS and EOS, a chat template, F16 matrices.
"""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType as GGMLType

CONTEXT = 256
HEAD_DIM = 64
N_HEADS = 2
N_KV_HEADS = 1
N_LAYERS = 2
N_EMBD = 128
N_FF = 160
CONTROL = ("<|system|>", "<|user|>", "<|assistant|>")
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}<|system|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CORPUS = [
    "Once upon a time there was a small fox who lived near the river.",
    "The fox said hello to the owl, and the owl said hello to the fox.",
    "They walked along the river until the moon rose over the hills.",
    "It was a good day, and nobody was hungry, and nobody was cold.",
]


def write_tiny_model(
    path: Path,
    *,
    tokenizer: bool = True,
    template: bool = True,
    n_experts: int = 0,
    architecture: str = "llama",
    weight_type: GGMLType = GGMLType.F16,
    control: tuple[str, ...] = (),
) -> Path:
    """Write the model; without a tokenizer it runs on token ids only.

    `control` are further control tokens. With experts, two of them for each token, they take the
    place of the feed-forward matrices.
    """
    processor = _train_tokenizer(control)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(processor.vocab_size())
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(2)
    if tokenizer:
        _add_tokenizer(writer, processor)
    if tokenizer and template:
        writer.add_chat_template(TEMPLATE)
    _add_tensors(writer, processor.vocab_size(), n_experts, weight_type)
    _finish(writer)
    return path


def write_vocabulary(path: Path) -> Path:
    """Write a file that holds the tokenizer and no tensor, like llama.cpp's ggml-vocab files."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny-vocab")
    _add_tokenizer(writer, _train_tokenizer())
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _train_tokenizer(control: tuple[str, ...] = ()) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        control_symbols=[*CONTROL, *control],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _add_tokenizer(
    writer: gguf.GGUFWriter, processor: sentencepiece.SentencePieceProcessor
) -> None:
    pieces = range(processor.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(i) for i in pieces])
    writer.add_token_scores([processor.get_score(i) for i in pieces])
    writer.add_token_types([_token_type(processor, i) for i in pieces])
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())
    writer.add_add_bos_token(True)


def _token_type(processor: sentencepiece.SentencePieceProcessor, i: int) -> gguf.TokenType:
    if processor.is_unknown(i):
        return gguf.TokenType.UNKNOWN
    if processor.is_control(i):
        return gguf.TokenType.CONTROL
    if processor.is_byte(i):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL


def _add_tensors(
    writer: gguf.GGUFWriter, n_vocab: int, n_experts: int, weight_type: GGMLType
) -> None:
    random = np.random.default_rng(7)

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        values = random.standard_normal(shape) * gain / np.sqrt(shape[-1])
        if weight_type == GGMLType.F16:  # not by way of float32, which rounds twice
            writer.add_tensor(f"{name}.weight", values.astype(np.float16))
            return
        packed = gguf.quants.quantize(values.astype(np.float32), weight_type)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=weight_type)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, np.float32))

    matrix("token_embd", n_vocab, N_EMBD, gain=np.sqrt(N_EMBD))
    matrix("output", n_vocab, N_EMBD, gain=2.0)
    norm("output_norm")
    for layer in range(N_LAYERS):
        at = f"blk.{layer}"
        norm(f"{at}.attn_norm")
        matrix(f"{at}.attn_q", N_HEADS * HEAD_DIM, N_EMBD, gain=1.5)
        matrix(f"{at}.attn_k", N_KV_HEADS * HEAD_DIM, N_EMBD, gain=1.5)
        matrix(f"{at}.attn_v", N_KV_HEADS * HEAD_DIM, N_EMBD)
        matrix(f"{at}.attn_output", N_EMBD, N_HEADS * HEAD_DIM)
        norm(f"{at}.ffn_norm")
        if n_experts:
            matrix(f"{at}.ffn_gate_inp", n_experts, N_EMBD, gain=2.0)
            matrix(f"{at}.ffn_gate_exps", n_experts, N_FF, N_EMBD)
            matrix(f"{at}.ffn_up_exps", n_experts, N_FF, N_EMBD)
            matrix(f"{at}.ffn_down_exps", n_experts, N_EMBD, N_FF)
            continue
        matrix(f"{at}.ffn_gate", N_FF, N_EMBD)
        matrix(f"{at}.ffn_up", N_FF, N_EMBD)
        matrix(f"{at}.ffn_down", N_EMBD, N_FF)
