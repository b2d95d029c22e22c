"""What the kernel that stores rows compiles to, for every type."""

from __future__ import annotations

import re
from typing import Any

import pytest

from localkv.kernels.gpu.attention.packed_attention import padded
from localkv.kernels.gpu.group_store import TOKENS, group_kernel, group_sizes, unpack_kernel
from localkv.kernels.gpu.rope_store import ROWS
from localkv.kernels.gpu.store_kv import query_kernel, store_kernel
from localkv.quant_formats import FORMATS, TOKEN_FORMATS
from support.aot.aot_report import (
    ARCHS,
    compile_kernel,
    gpus_in_turn,
    report,
    resources,
    types_on_gpus,
)
from support.aot.attention_builds import plane_types
from support.quick import quick

NAMES = [fmt.name for fmt in TOKEN_FORMATS.values() if fmt.has_part("gpu") and not fmt.shared_codec]
FLOATS = ("q_ptr", "k_ptr", "v_ptr", "q_out_ptr", "q_norm_ptr", "k_norm_ptr", "v_norm_ptr")
FLOATS += ("cos_ptr", "sin_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr")
IDS = ("tokens_ptr", "slots_ptr")
QUERY = {"N_HEADS": 32, "Q_STRIDE": 128, "ROPE_DIMS": 128, "INTERLEAVED": False}
NORMS = {"NORM_Q": "", "CENTRED": False, "PER_HEAD": False}


def check(kernel: Any, arch: int, name: str, rows: int, **constants: Any) -> None:
    """Hardly a spill, two roundings."""
    fmt = TOKEN_FORMATS[name]
    types: dict[str, str | tuple[str, ...]] = {
        **dict.fromkeys(FLOATS, "*fp32"),
        **dict.fromkeys(IDS, "*i64"),
        **dict.fromkeys(("k_planes", "v_planes"), plane_types(fmt)),
        **dict.fromkeys(("n_tokens", "n_stored"), "i32"),
        "eps": "fp32",
    }
    compiled = compile_kernel(
        kernel,
        arch,
        {name: types[name] for name in kernel.arg_names if name in types},
        {"ROWS": rows, **constants},
        num_warps=1 if rows == 1 else 4,
        enable_fp_fusion=False,
    )
    # the search in iq4_nl's codebook leaves more on sm_86
    assert resources(compiled)["STACK"] <= (32 if name == "iq4_nl" else 16)
    assert "st.global" in compiled.asm["ptx"]
    # division has fused steps of its own, but is a function or a macro of PTX
    assert not re.search(r"\bfma\.rn\.f32\b", compiled.asm["ptx"])


def of_cache(name: str, head_dim: int, value_dim: int) -> dict[str, Any]:
    """Compile-time arguments of rows of a type."""
    fmt = FORMATS[name]
    codec = fmt.part("gpu")
    absent = () if fmt.codec_name != name else ("k_scale_ptr", "v_scale_ptr")
    return {
        "WRITE_K": codec.write_rows,
        "WRITE_V": codec.write_rows,
        "N_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "WIDTH": padded(head_dim),
        "VALUE_DIM": value_dim,
        "VALUE_WIDTH": padded(value_dim),
        **dict.fromkeys(absent),
    }


@types_on_gpus(NAMES, (86, 90), ("f16", "q5_1", "fp8_e4m3_token"))
def test_store(arch: int, name: str) -> None:
    """For one token or eight, with norms of heads or without."""
    at = ARCHS.index(arch) + NAMES.index(name)
    norm = "before" if at % 4 > 1 else ""
    check(
        store_kernel,
        arch,
        name,
        (1, ROWS)[at % 2],
        **of_cache(name, 128, 128),
        **QUERY,
        **{**NORMS, "NORM_Q": norm},
        NORM_K=norm,
        v_norm_ptr=None,
        q_scale_ptr=None,
        ROTATION_K=128,
        ROTATION_V=64,
        PAGE_BYTES=8 * 256 * 16 if at % 3 and FORMATS[name].repacks else 0,
    )


def test_store_without_queries() -> None:
    """A cache with several segments stores the queries' turn with the last one only."""
    check(
        store_kernel,
        90,
        "q8_0",
        ROWS,
        **of_cache("q8_0", 128, 128),
        **{**QUERY, "N_HEADS": 0},
        **NORMS,
        NORM_K="",
        **dict.fromkeys(("q_ptr", "q_norm_ptr", "k_norm_ptr", "v_norm_ptr", "q_scale_ptr")),
        ROTATION_K=128,
        ROTATION_V=64,
        PAGE_BYTES=0,
    )


REPACKED = [
    fmt.name
    for fmt in FORMATS.values()
    if (fmt.name in NAMES and fmt.repacks) or fmt.group_tokens > 1
]


@types_on_gpus(REPACKED, everywhere=["q8_0"])
def test_unpack(arch: int, name: str) -> None:
    """A page in an arena is unpacked, and codes come in whole words."""
    fmt, codec = FORMATS[name], FORMATS[name].part("gpu")
    compiled = compile_kernel(
        unpack_kernel,
        arch,
        {"planes": plane_types(fmt), "out_ptr": "*fp32", "page": "i32"},
        {
            "READ": codec.read_tile,
            "COLUMNS": codec.columns,
            "UNIT": getattr(codec, "UNIT", 1.0),
            "N_KV_HEADS": 8,
            "HEAD_DIM": 128,
            "WIDTH": 128,
            "TOKENS": TOKENS,
            "PAGE_BYTES": 8 * 256 * 16,
            "PTX": True,
        },
        num_warps=4,
        enable_fp_fusion=False,
    )
    got = report(compiled)
    assert got.stack_bytes == 0
    assert got.stores
    assert got.loads["128"] + got.loads["64"] > 0


@pytest.mark.parametrize(
    ("arch", "apart"),
    quick(
        [*((arch, False) for arch in ARCHS), (86, True), (90, True), (120, True)],
        [(90, False), (90, True)],
    ),
)
def test_groups(arch: int, apart: bool) -> None:
    """Types with scales by channel, one after the other, beside one that packs each token alone:
    from f16 in a tail, or from float32 into a page of an arena."""
    names = [name for name, fmt in FORMATS.items() if fmt.group_tokens > 1]
    name = names[ARCHS.index(arch) % len(names)]
    constants = of_cache(name, 128, 96)
    sizes = group_sizes(FORMATS[name], FORMATS["q4_1"])
    n_warps = sizes.pop("num_warps")
    constants["WRITE_V"] = FORMATS["q4_1"].part("gpu").write_rows
    types: dict[str, str | tuple[str, ...]] = {
        "groups_ptr": "*i64",
        **dict.fromkeys(("k_rows_ptr", "v_rows_ptr"), "*fp32" if apart else "*fp16"),
        "k_planes": plane_types(FORMATS[name]),
        "v_planes": plane_types(FORMATS["q4_1"]),
    }
    compiled = compile_kernel(
        group_kernel,
        arch,
        types,
        {
            **constants,
            **dict.fromkeys(("k_scale_ptr", "v_scale_ptr")),
            "ROTATION_K": 0,
            "ROTATION_V": 0 if apart else 32,
            "PAGE_BYTES": 8 * 256 * 16 if apart else 0,
            **sizes,
        },
        num_warps=n_warps,
        enable_fp_fusion=False,
    )
    assert resources(compiled)["STACK"] <= 16
    assert "st.global" in compiled.asm["ptx"]
    assert not re.search(r"\bfma\.rn\.f32\b", compiled.asm["ptx"])


KINDS: dict[str, tuple[tuple[int, int], str, dict[str, Any]]] = {
    "192/128": ((192, 128), "", {"v_norm_ptr": None}),
    "512": ((512, 512), "before", {}),
    "gated": ((256, 256), "before", {"Q_STRIDE": 512, "ROPE_DIMS": 64, "v_norm_ptr": None}),
    "after": ((112, 112), "after", {"q_scale_ptr": None, "v_norm_ptr": None, "INTERLEAVED": True}),
    "layer": ((160, 160), "before", {"CENTRED": True, "PER_HEAD": True, "v_norm_ptr": None}),
}


@gpus_in_turn("kind", [*KINDS])
def test_kinds_of_attention(arch: int, kind: str) -> None:
    """Other heads and norms, with a type that changes from one to the next."""
    dims, norm, changes = KINDS[kind]
    name = ("q8_0", "f16", "fp8_e4m3_token")[ARCHS.index(arch) % 3]
    if dims[0] % 32:
        name = "f16"
    head_dim = dims[0]
    constants = {
        **QUERY,
        "Q_STRIDE": head_dim,
        "ROPE_DIMS": head_dim,
        **NORMS,
        "NORM_Q": norm,
        **changes,
    }
    rotations = {"ROTATION_K": head_dim & -head_dim, "ROTATION_V": dims[1] & -dims[1]}
    rows = (1, ROWS)[ARCHS.index(arch) % 2]
    check(
        store_kernel,
        arch,
        name,
        rows,
        **of_cache(name, *dims),
        **rotations,
        NORM_K=norm,
        PAGE_BYTES=0,
        **constants,
    )
    queries = {name: value for name, value in constants.items() if name != "v_norm_ptr"}
    check(query_kernel, arch, name, rows, HEAD_DIM=head_dim, WIDTH=padded(head_dim), **queries)
