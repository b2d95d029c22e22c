"""Write converted.json: small checkpoints, and what llama.cpp's converter makes of them.

    pip install torch transformers tokenizers sentencepiece
    python make_converted.py LLAMA_CPP

LLAMA_CPP is a folder with llama.cpp's sources. The file has for each checkpoint:

- its configuration, and types and shapes of its tensors, as transformers saves them
- the metadata of the GGUF file, with digests in place of long lists
- type, shape and digest of each tensor there
- the first logits after a text by transformers, in float32 as base64
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, f"{sys.argv[1]}/gguf-py")
sys.path.insert(0, str(Path(__file__).parents[1]))

import gguf
import numpy as np
import torch
import transformers
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import TextModel

from support.checkpoints import DATA, GROUP, N_VOCAB, write_checkpoint
from support.conversions import IDS, N_LOGITS, digest

SMALL = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
THREE, FOUR, SIX = (SMALL | {"num_hidden_layers": n} for n in (3, 4, 6))
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = THREE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
}
FACTORS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
SHORT_CONV = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "short_factor": [1.0 + i / 16 for i in range(8)],
}


def bytes_of(pre: str, *, adds: str = "", nfc: bool = False, **specials: str) -> dict[str, Any]:
    return {"kind": "bpe", "pre": pre, "adds": adds, "nfc": nfc, "specials": specials}


CHATML = {"eos": "<|im_end|>", "pad": "<|endoftext|>", "more": "<|im_start|>"}
QWEN2, QWEN35 = (bytes_of(pre, nfc=True, **CHATML) for pre in ("qwen2", "qwen35"))
LLAMA = bytes_of("llama-bpe", adds="bos", bos="<|begin_of_text|>", eos="<|eot_id|>")
TEKKEN = bytes_of("tekken", adds="bos", bos="<s>", eos="</s>")
SMOLLM = bytes_of("smollm", bos="<|endoftext|>", eos="<|im_end|>")
GPT2, DBRX = (bytes_of(pre, eos="<|endoftext|>") for pre in ("gpt-2", "dbrx"))
GLM = bytes_of("glm4", eos="<|endoftext|>", mask="[gMASK]", user="<|user|>", seen="<|observation|>")
DEEPSEEK = bytes_of(
    "deepseek-v3", adds="bos", bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>"
)
GPT_OSS = bytes_of("gpt-4o", bos="<|startoftext|>", eos="<|return|>")
SPM = {"kind": "sentencepiece", "heads": "llama"}
SPM_GEMMA = {"kind": "sentencepiece", "heads": "gemma"}
PIECES = {"kind": "wordpiece"}
ENCODER = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
WINDOW = {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL, LLAMA),
    "llama-3.1": (
        "LlamaForCausalLM",
        "LlamaConfig",
        SMALL | {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": LLAMA3},
        LLAMA,
    ),
    "llama-sentencepiece": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"dtype": "float16"}, SPM),
    "llama-yarn": (
        "LlamaForCausalLM",
        "LlamaConfig",
        SMALL | {"attention_bias": True, "rope_parameters": YARN},
        SMOLLM,
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": None}, TEKKEN),
    "ministral3": ("Ministral3ForCausalLM", "Ministral3Config", SMALL | {"head_dim": 16}, TEKKEN),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SMALL | LOCAL, SPM),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", FOUR, LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SMALL, QWEN2),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        SMALL | MOE | {"shared_expert_intermediate_size": 64},
        QWEN2,
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        SMALL | {"head_dim": 32, "tie_word_embeddings": True},
        QWEN2,
    ),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        SMALL | MOE | {"head_dim": 32, "norm_topk_prob": True},
        QWEN2,
    ),
    "qwen3next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        FOUR | MOE | HYBRID | {"shared_expert_intermediate_size": 32},
        QWEN35,
    ),
    "qwen35": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", FOUR | HYBRID, QWEN35),
    "qwen35moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        FOUR | MOE | HYBRID | {"shared_expert_intermediate_size": 32},
        QWEN35,
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SMALL | {"head_dim": 16}, SPM_GEMMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SMALL | WINDOW, SPM_GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIX | WINDOW, SPM_GEMMA),
    "phi2": (
        "PhiForCausalLM",
        "PhiConfig",
        SMALL | {"intermediate_size": 256, "num_key_value_heads": 4},
        GPT2,
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL, SPM),
    "phi3-long": (
        "Phi3ForCausalLM",
        "Phi3Config",
        SMALL | {"max_position_embeddings": 1024, "rope_parameters": LONG},
        SPM,
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", SMALL | FACTORS, SMOLLM),
    "granitemoe": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        SMALL | LOCAL | FACTORS | {"shared_intermediate_size": 64},
        SMOLLM,
    ),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", SMALL | {"clip_qkv": 8.0}, GPT2),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", SMALL, DBRX),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", FOUR | {"sliding_window": 64}, DBRX),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        SMALL | {"num_experts": 4, "num_experts_per_tok": 2},
        GPT2,
    ),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", SMALL | {"head_dim": 16}, GLM),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        THREE
        | {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
        GLM,
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        SMALL | LOCAL | {"head_dim": 16, "sliding_window": 32, "rope_parameters": YARN},
        GPT_OSS,
    ),
    "deepseek2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        LATENT | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        DEEPSEEK,
    ),
    "deepseek3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LATENT
        | {
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        DEEPSEEK,
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        FOUR | SHORT_CONV | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 32},
        LLAMA,
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        FOUR | SHORT_CONV | MOE | {"num_dense_layers": 1},
        LLAMA,
    ),
    "bert": ("BertModel", "BertConfig", ENCODER, PIECES),
    "bert-classes": (
        "BertForSequenceClassification",
        "BertConfig",
        ENCODER | {"num_labels": 1},
        PIECES,
    ),
    "gemma-embedding": ("Gemma3TextModel", "Gemma3TextConfig", FOUR | WINDOW, SPM_GEMMA),
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


CODES: dict[str, dict[str, Any]] = {
    "gptq": GPTQ | {"sym": True, "desc_act": False},
    "gptq-zeros": GPTQ | {"sym": False, "desc_act": False},
    "gptq-order": GPTQ | {"sym": True, "desc_act": True},
    "gptq-8-bits": GPTQ | {"bits": 8, "sym": True, "checkpoint_format": "gptq"},
    "gptq-v2": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "compressed-int4": compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP
    ),
    "compressed-int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-fp8": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
}
"""Checkpoints of codes: the first one above with other matrices."""


def with_codes(case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whose matrices in layers are codes, by the layouts of the programs' kernels."""
    tensors = dict[str, Any]()
    method, kind = settings["quant_method"], settings.get("format")
    for name, (dtype, shape) in case["tensors"].items():
        if len(shape) < 2 or ".layers." not in name:
            tensors[name] = [dtype, shape]
            continue
        base, (n_out, n_in) = name.removesuffix(".weight"), shape
        if method == "gptq":
            n_each, n_groups = 32 // settings["bits"], n_in // GROUP
            tensors[f"{base}.qweight"] = ["I32", [n_in // n_each, n_out]]
            tensors[f"{base}.qzeros"] = ["I32", [n_groups, n_out // n_each]]
            tensors[f"{base}.scales"] = ["F16", [n_groups, n_out]]
            tensors[f"{base}.g_idx"] = ["I32", [n_in]]
        elif kind == "pack-quantized":
            tensors[f"{name}_packed"] = ["I32", [n_out, n_in // 8]]
            tensors[f"{name}_scale"] = ["BF16", [n_out, n_in // GROUP]]
            tensors[f"{name}_shape"] = ["I64", [2]]
        elif method == "fp8":
            tensors[name] = ["F8_E4M3", shape]
            tensors[f"{name}_scale_inv"] = ["F32", [n_out // GROUP, n_in // GROUP]]
        else:
            tensors[name] = ["I8" if kind == "int-quantized" else "F8_E4M3", shape]
            tensors[f"{name}_scale"] = ["BF16", [n_out, 1]]
    config = case["config"] | {"quantization_config": settings}
    return {"config": config, "tensors": tensors, "tokenizer": case["tokenizer"]}


def with_mxfp4(case: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss as it is published."""
    tensors = dict[str, Any]()
    for name, (dtype, shape) in case["tensors"].items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            n_experts, n_in, n_out = shape
            tensors[f"{name}_blocks"] = ["U8", [n_experts, n_out, n_in // 32, 16]]
            tensors[f"{name}_scales"] = ["U8", [n_experts, n_out, n_in // 32]]
        else:
            tensors[name] = [dtype, shape]
    config = case["config"] | {"quantization_config": {"quant_method": "mxfp4"}}
    return {"config": config, "tensors": tensors, "tokenizer": case["tokenizer"]}


def saved(class_name: str, config: Any, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """Configuration and tensors as transformers writes them."""
    model = getattr(transformers, class_name)(config).to(dtype)
    model.save_pretrained(folder)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        tensors |= {name: [one["dtype"], one["shape"]] for name, one in header.items()}
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors}


def converted(folder: Path, pre: str, path: Path) -> dict[str, Any]:
    """What llama.cpp's converter makes of a checkpoint."""
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    config = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(config, ModelType.TEXT))
    kind.no_mtp = True
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.GUESSED, path, eager=True).write()
    reader = gguf.GGUFReader(path)
    keys = {
        name: digest(field.contents())
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: [
            tensor.tensor_type.name,
            [int(n) for n in reversed(tensor.shape)],
            hashlib.sha256(tensor.data.tobytes()).hexdigest()[:12],
        ]
        for tensor in reader.tensors
    }
    return {"keys": keys, "file": tensors}


def first_logits(class_name: str, folder: Path) -> str:
    kind = getattr(transformers, class_name)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, -1, :N_LOGITS]
    return base64.b64encode(logits.numpy().astype(np.float32).tobytes()).decode()


def main() -> None:
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for name, (class_name, config_name, options, tokenizer) in CASES.items():
        options = dict(options)
        dtype = getattr(torch, options.pop("dtype", "bfloat16"))
        config = getattr(transformers, config_name)(**options)
        with tempfile.TemporaryDirectory() as folder:
            case = saved(class_name, config, dtype, Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            case["tokenizer"] = tokenizer
            checkpoint = write_checkpoint(Path(folder) / "tiny", case)
            case |= converted(checkpoint, tokenizer.get("pre", "default"), Path(folder) / "x.gguf")
            if class_name.endswith("ForCausalLM"):
                case["logits"] = first_logits(class_name, checkpoint)
        found[name] = case
        print(name, flush=True)
    plain = found["llama"]
    cases = {name: with_codes(plain, settings) for name, settings in CODES.items()}
    for name, case in (cases | {"gpt-oss-mxfp4": with_mxfp4(found["gpt-oss"])}).items():
        pre = case["tokenizer"]["pre"]
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(Path(folder) / "tiny", case)
            case |= converted(checkpoint, pre, Path(folder) / "x.gguf")
        found[name] = case
        print(name, flush=True)
    entries = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items())
    DATA.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
