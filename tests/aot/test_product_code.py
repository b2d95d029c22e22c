"""Machine code of the product kernels, for every generation of GPUs.

Limits are what was compiled when they were set, and a little more: a change that makes the code
worse fails. They say nothing about speed, which has to be measured.
"""

from __future__ import annotations

from itertools import product

import pytest

from localkv.arch.spec import Activation, MlpSpec
from localkv.kernels.gpu.products.tile_sizes import tile_sizes
from localkv.quant_formats import WEIGHT_FORMATS
from support.aot.aot_report import ARCHS, BUDGET_FACTOR, ONE_TOKEN_FACTOR, SHARED_KIB, gpus_in_turn
from support.aot.product_builds import Build, experts_down_build, gate_up_build, linear_build
from support.quick import quick

NAMES = [fmt.name for fmt in WEIGHT_FORMATS.values()]
ONE, FEW, MANY = 1, 8, 128
"""Numbers of tokens: without tensor cores; as few as they take; a prompt."""
ODD = ("q4_0", "q8_0", "q5_0", "f16")
TRIPLES = [("q4_K", "q4_K", "q6_K"), ("q5_K", "q5_K", "q5_K")]
"""Types of the matrices of queries, keys and values."""

INSTRUCTIONS = {
    "f32": (3.0, 31.0, 31.0),
    "f16": (3.3, 2.0, 5.1),
    "bf16": (4.0, 5.6, 8.7),
    "q8_0": (4.3, 4.6, 7.2),
    "q5_1": (6.0, 4.8, 8.0),
    "q5_0": (5.1, 4.7, 7.9),
    "q4_1": (4.6, 4.4, 7.1),
    "q4_0": (4.1, 4.3, 7.0),
    "iq4_nl": (6.0, 6.2, 9.1),
    "q2_K": (5.6, 5.3, 5.0),
    "q3_K": (5.6, 5.2, 7.8),
    "q4_K": (5.7, 5.1, 4.8),
    "q5_K": (6.2, 5.2, 7.9),
    "q6_K": (5.2, 5.4, 5.1),
    "iq4_xs": (6.4, 6.2, 8.8),
    "iq3_s": (7.1, 7.0, 7.9),
    "iq3_xxs": (7.3, 6.9, 7.9),
    "iq2_s": (6.7, 5.9, 7.1),
    "iq2_xs": (6.9, 6.2, 7.4),
    "iq2_xxs": (6.6, 5.9, 7.1),
    "iq1_m": (5.4, 5.0, 6.1),
    "iq1_s": (4.9, 4.4, 5.5),
    "q2_0": (4.3, 3.5, 4.1),
    "q1_0": (4.5, 3.1, 5.8),
    "tq2_0": (4.3, 3.5, 4.1),
    "tq1_0": (5.6, 3.8, 4.4),
    "mxfp4": (6.1, 6.3, 9.2),
    "nvfp4": (6.4, 5.7, 6.2),
}
"""Thread instructions of the main loop for each weight, for ONE, FEW and MANY tokens; on 86 and 90,
and of the ordinary types on all GPUs."""
OTHER_GPUS_FACTOR = 1.25
"""What other types may have more on the other GPUs: tq2_0 has 1.23 times as many on 100."""

REGISTERS = {ONE: 168, FEW: 128, MANY: 255}
"""For each thread: those with which a multiprocessor, which has 65536, holds 12 and 16 warps, so
that enough loads are under way; 255 is what a thread can have."""


def check(build: Build, n_tokens: int, *, products: int = 1, most_local: int = 0) -> None:
    """No spilled registers, wide loads, no more registers and shared memory than allowed."""
    report = build.report
    assert report.n_loop > 0
    assert report.n_local <= most_local
    assert report.stack_bytes <= 32, "ptxas leaves some registers outside the loop"
    assert report.registers <= REGISTERS[n_tokens]
    assert report.shared_bytes <= SHARED_KIB[build.arch] * 1024
    assert build.run_bytes
    if build.looks_up:
        assert not set(build.run_bytes) - {16, 8, 4, 2}, "words, whole entries, and beside them"
        assert report.loads["U8"] <= 2 * products, "nothing is loaded byte by byte but scales"
        assert build.holds_entries
    else:
        assert set(build.run_bytes) == {16}, "codes are loaded 16 bytes at a time"
        assert report.loads["128"] >= 0.95 * build.code_bytes * products


ORDINARY = ("q4_K", "q6_K", "q8_0")


def turn_of(name: str) -> int:
    """One number of tokens for each type, so that all have their turn."""
    return (ONE, FEW, MANY)[NAMES.index(name) % 3]


def is_compiled(arch: int, name: str, n_tokens: int) -> bool:
    """One type on all GPUs, and two kernels of every type, each on a GPU in turn.

    GPUs like 86 get one number of tokens. The two kernels are for one token and for a number in
    turn.
    """
    if name == "q4_K":
        return arch not in (80, 89) or n_tokens == turn_of(name)
    gpu = ARCHS[(NAMES.index(name) + 3 * (n_tokens == ONE)) % len(ARCHS)]
    return arch == gpu and n_tokens in (ONE, turn_of(name))


def is_listed(arch: int, name: str, n_tokens: int) -> bool:
    """The exhaustive cases: three types on all GPUs, and all types on 90 and on 86.

    GPUs like 86 get one number of tokens. 90 gets one token, and 86 a number in turn.
    """
    own = n_tokens == turn_of(name)
    if name in ORDINARY:
        return own or arch not in (80, 89)
    if arch == 90:
        return own or n_tokens == ONE
    return arch == 86 and own


EVERYWHERE = [
    (arch, name, n)
    for n, arch, name in product((ONE, FEW, MANY), ARCHS, NAMES)
    if is_compiled(arch, name, n) or is_listed(arch, name, n)
]
SOME = [case for case in EVERYWHERE if is_compiled(*case)]


@pytest.mark.parametrize(
    ("arch", "name", "n_tokens"), quick(EVERYWHERE, [c for c in SOME if c[0] == 90], SOME)
)
def test_each_type(arch: int, name: str, n_tokens: int) -> None:
    build = linear_build(arch, (name,), n_tokens)
    check(build, n_tokens)
    budget = INSTRUCTIONS[name][(ONE, FEW, MANY).index(n_tokens)]
    factor = ONE_TOKEN_FACTOR if n_tokens == ONE else BUDGET_FACTOR
    if arch not in (86, 90) and name not in ORDINARY:
        factor *= OTHER_GPUS_FACTOR
    assert build.instructions_per_weight <= factor * budget
    units = {op.split(".")[0] for op in build.report.matrix_ops}
    own = {90: "HGMMA", 100: "UTCHMMA"}.get(arch, "HMMA")
    if n_tokens == ONE or name == "f32":
        assert not units, "fp32 throughout"
    elif n_tokens == MANY:
        assert units == {own}
    else:
        assert units in ({"HMMA"}, {own}), "3.9 has Hopper's own for few tokens, too"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_threads_hold_whole_entries(*, exact: bool, alone: bool) -> None:
    """A tile has at least as many units of 64 as threads, also of small matrices."""
    for n_tokens, unit, n_out in product((1, 2, 8, 64, 128), (64, 128, 256), (1, 40, 4096)):
        for n_in in (256, 512, 768, 4096):
            sizes = tile_sizes(
                n_tokens, n_out, n_in, unit, 100, exact=exact, alone=alone, looks_up=True
            )
            assert sizes.rows * sizes.values // 64 >= 32 * sizes.n_warps


@pytest.mark.slow
@gpus_in_turn("name,n_tokens", [*product(("q4_K", "q5_K"), (16, 32, 64))], (86, 100))
def test_numbers_of_tokens_between(arch: int, name: str, n_tokens: int) -> None:
    check(linear_build(arch, (name,), n_tokens), MANY)


@gpus_in_turn("name,n_tokens", [*zip(ODD, (ONE, FEW, MANY, ONE), strict=True)], (90, 86))
def test_small_matrices_of_odd_widths(arch: int, name: str, n_tokens: int) -> None:
    """Few rows for a program, and a last step that is not full."""
    build = linear_build(arch, (name,), n_tokens, n_out=512, n_in=608)
    assert 608 % build.sizes.values
    check(build, n_tokens)


@gpus_in_turn("name", ["q4_K", "q5_K", "q6_K"], (86, 90))
def test_small_matrices(arch: int, name: str) -> None:
    """And indices of 64 bits."""
    build = linear_build(arch, (name,), ONE, n_out=512, n_in=2048, wide=True)
    assert build.sizes.rows == 4
    check(build, ONE)


@pytest.mark.parametrize("n_tokens", quick([ONE, MANY], [ONE]))
def test_what_comes_with_a_product(n_tokens: int) -> None:
    """Bias, residual, activations that are halved; rows that several programs share."""
    check(linear_build(86, ("f16",), n_tokens, epilogue=True), n_tokens)
    check(linear_build(86, ("f16", "f16"), n_tokens, epilogue=True), n_tokens)
    check(gate_up_build(86, "q8_0", n_tokens, routed=False, split=True), n_tokens)
    check(gate_up_build(86, "q8_0", n_tokens, routed=False, block=MlpSpec(96, "gelu")), n_tokens)
    check(
        gate_up_build(86, "q4_0", n_tokens, routed=False, block=MlpSpec(96, "swiglu_oai")), n_tokens
    )


@gpus_in_turn("activation,n_tokens", [*product(("relu2", "xielu"), (ONE, MANY))], (86, 90, 120))
def test_activations_without_a_gate(arch: int, activation: Activation, n_tokens: int) -> None:
    check(linear_build(arch, ("q4_0",), n_tokens, activation=activation), n_tokens)


@pytest.mark.slow
@gpus_in_turn("names,n_tokens", [*product(TRIPLES, (ONE, MANY))], (86, 100))
def test_q_k_and_v_in_one_launch(arch: int, names: tuple[str, ...], n_tokens: int) -> None:
    """The main loop is the longest of the three."""
    check(linear_build(arch, names, n_tokens), n_tokens, products=0)


@gpus_in_turn("name,n_tokens", [*product(("q4_K", "q5_K", "q8_0"), (ONE, MANY))])
def test_gate_and_up(arch: int, name: str, n_tokens: int) -> None:
    check(gate_up_build(arch, name, n_tokens, routed=False), n_tokens)


@gpus_in_turn("n_tokens", [ONE, FEW, MANY])
def test_experts_gate_and_up(arch: int, n_tokens: int) -> None:
    # with one token two addresses are read back in each step
    most_local = 2 if n_tokens == ONE else 0
    check(gate_up_build(arch, "q4_K", n_tokens, routed=True), n_tokens, most_local=most_local)


@gpus_in_turn("n_tokens", [FEW, ONE, MANY], (90, 100))
def test_experts_of_gpt_oss(arch: int, n_tokens: int) -> None:
    """MXFP4, biases of each expert, and its clamped SwiGLU."""
    build = gate_up_build(
        arch, "mxfp4", n_tokens, routed=True, block=MlpSpec(96, "swiglu_oai"), biased=True
    )
    check(build, n_tokens)
    check(experts_down_build(arch, "mxfp4", n_tokens, biased=True), n_tokens)


LIMITED = (MlpSpec(96, limit=7.0), MlpSpec(96, limit=7.0, limits_gate=True))


@gpus_in_turn("block,n_tokens", [*product(LIMITED, (ONE, MANY))])
def test_limited_experts(arch: int, block: MlpSpec, n_tokens: int) -> None:
    """Step 3.5's SwiGLU, and Maple's; of the shared one, too."""
    most_local = 2 if n_tokens == ONE else 0
    build = gate_up_build(arch, "q4_K", n_tokens, routed=True, block=block)
    check(build, n_tokens, most_local=most_local)
    check(gate_up_build(arch, "q8_0", n_tokens, routed=False, block=block), n_tokens)


@gpus_in_turn("n_tokens", [MANY, ONE, FEW])
def test_down(arch: int, n_tokens: int) -> None:
    check(experts_down_build(arch, "q6_K", n_tokens), n_tokens)
