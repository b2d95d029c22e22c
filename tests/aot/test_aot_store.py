"""What the kernel that stores rows compiles to, for every type."""

from __future__ import annotations

import re

import pytest

from localkv.formats import KV_FORMATS
from localkv.kernels.gpu.rope_store import ROWS
from localkv.kernels.gpu.store_kv import store_kernel
from support.aot.aot_report import ARCHS, compile_kernel, on_every_gpu, report
from support.aot.attention_builds import plane_types

NAMES = [fmt.name for fmt in KV_FORMATS.values() if not fmt.shared_codec]
FLOATS = ("q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "q_scale_ptr")
SCALES = ("k_scale_ptr", "v_scale_ptr")


@pytest.mark.parametrize("name", NAMES)
@on_every_gpu
def test_store(arch: int, name: str) -> None:
    """For one token or eight, with norms of heads or without: hardly a spill, two roundings."""
    rows = (1, ROWS)[(ARCHS.index(arch) + NAMES.index(name)) % 2]
    fmt = KV_FORMATS[name]
    codec = fmt.part("gpu_cache")
    types: dict[str, str | tuple[str, ...]] = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr"), "*fp32"),
        **dict.fromkeys((*FLOATS, *SCALES), "*fp32"),
        **dict.fromkeys(("tokens_ptr", "slots_ptr"), "*i64"),
        **dict.fromkeys(("k_planes", "v_planes"), plane_types(fmt)),
        **dict.fromkeys(("n_tokens", "n_stored"), "i32"),
        "eps": "fp32",
    }
    constants = {
        "WRITE_K": codec.write_rows,
        "WRITE_V": codec.write_rows,
        "N_HEADS": 32,
        "N_KV_HEADS": 8,
        "HEAD_DIM": 128,
        "WIDTH": 128,
        "ROWS": rows,
        "NORM": (ARCHS.index(arch) + NAMES.index(name)) % 4 > 1,
        "ROPE_DIMS": 128,
        "INTERLEAVED": False,
        "SCALE_Q": False,
        "ROTATION_K": 128,
        "ROTATION_V": 64,
        "SCALED_K": fmt.codec_name != name,
        "SCALED_V": fmt.codec_name != name,
    }
    compiled = compile_kernel(
        store_kernel,
        arch,
        types,
        constants,
        num_warps=1 if rows == 1 else 4,
        enable_fp_fusion=False,
    )
    got = report(compiled)
    # the search in iq4_nl's codebook leaves more on sm_86
    assert got.stack_bytes <= (32 if name == "iq4_nl" else 16)
    assert got.stores
    # division has fused steps of its own, but is a function or a macro of PTX
    assert not re.search(r"\bfma\.rn\.f32\b", compiled.asm["ptx"])
