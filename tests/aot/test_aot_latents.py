"""What the machine code of attention over latents does on six generations of GPUs."""

from __future__ import annotations

import pytest

from localkv.kernels.gpu.attention.latents import latent_constants, latent_tiles, latents_kernel
from localkv.quant_formats import FORMATS, KV_FORMATS, TOKEN_FORMATS
from support.aot.aot_report import (
    ARCHS,
    MOST_SPILLS,
    SHARED_KIB,
    Report,
    compile_kernel,
    gpus_in_turn,
    report,
    types_on_gpus,
)
from support.aot.attention_builds import NUMBERS, plane_types
from support.quick import quick

NAMES = [fmt.name for fmt in TOKEN_FORMATS.values() if fmt.has_part("gpu") and not fmt.shared_codec]
GROUPED = [fmt.name for fmt in KV_FORMATS.values() if fmt.group_tokens > 1]


def built(
    arch: int, type_k: str, type_v: str, latent_dim: int = 512, tail: int = 0, tail_tokens: int = 1
) -> Report:
    format_k, format_v = FORMATS[type_k], FORMATS[type_v]
    tiles = latent_tiles(format_k, format_v, is_tail=tail == 2)
    constants = latent_constants(
        format_k,
        format_v,
        n_heads=16,
        latent_dim=latent_dim,
        rope_dim=64,
        tiles=tiles,
        softcap=False,
        ptx=True,
        tail=tail,
        tail_tokens=tail_tokens,
    )
    types = {name: NUMBERS[name] for name in ("first_position", "table_width", "scale", "softcap")}
    types |= {
        "q_ptr": "*fp32",
        "q_rotated_ptr": "*fp32",
        "k_planes": plane_types(format_k),
        "v_planes": plane_types(format_v),
        "page_table_ptr": "*i64",
        "lengths_ptr": "*i32",
        "starts_ptr": "*i32",
        "positions_ptr": "*i64",
        "out_ptr": "*fp32",
        "lse_ptr": "*fp32",
    }
    if tail:
        types |= {"exact_ptr": "*i64", "tail_start": "i32", "tail_newest": "i32"}
    compiled = compile_kernel(
        latents_kernel, arch, types, constants, num_warps=tiles.warps, num_stages=tiles.stages
    )
    return report(compiled)


def check(got: Report, arch: int) -> None:
    assert got.n_local <= MOST_SPILLS, "registers are spilled in the main loop"
    assert got.stack_bytes <= 64, "registers are spilled outside of it"
    assert got.shared_bytes <= SHARED_KIB[arch] * 1024
    assert got.matrix_ops


@types_on_gpus(NAMES, (86, 90), ("f16", "q5_1"))
def test_wide_latents(arch: int, name: str) -> None:
    """Latents of 512 and 64 rotated channels."""
    got = built(arch, name, "f16")
    if name == "f32":  # three products of each pair: there are more values than registers
        assert got.shared_bytes <= SHARED_KIB[arch] * 1024
    else:
        check(got, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", quick(ARCHS, (), (86, 90, 120)))
def test_narrower_latents(arch: int) -> None:
    check(built(arch, "q8_0", "q4_0", 256), arch)


@pytest.mark.slow
@gpus_in_turn("name", ["q4_0", *GROUPED], (86, 90, 120))
def test_what_comes_before_a_tail(arch: int, name: str) -> None:
    """Also of types that pack several tokens together."""
    check(built(arch, name, "f16", tail=1, tail_tokens=FORMATS[name].group_tokens), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", quick((86, 90, 120), (), (90, 120)))
def test_tails(arch: int) -> None:
    check(built(arch, "f16", "f16", tail=2, tail_tokens=32), arch)
