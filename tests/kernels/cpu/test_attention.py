"""The CPU's compiled attention and the order in which it keeps pages."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.arch.spec import AttentionParams
from localkv.cache.layout import SegmentSpec
from localkv.errors import UsageError
from localkv.kernels.cpu.attention import kernels as attention_kernels
from localkv.kernels.cpu.attention import packed_attention
from localkv.kernels.cpu.attention.kernels import MAX_ROWS
from localkv.kernels.cpu.attention.plan import row_blocks
from localkv.kernels.cpu.attention.sizes import BLOCK_ROWS
from localkv.kernels.cpu.jit import kernel_folder
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.reference.torch_arrays import encode
from localkv.quant_formats import TOKEN_FORMATS
from localkv.system.threads import n_threads, use_threads
from support.attention_checks import WINDOWED_LENGTHS, check_rows_without_keys
from support.attention_checks import check as check_attention
from support.attention_checks import check_windows as check_all_windows
from support.cache_types import NAMES, NEW_PAIRS
from support.cpu_ops import cpu_attention, store_kv_cpu
from support.cpu_pages import pool_planes
from support.quick import quick
from support.torch_edge import torch_cache

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2"}
KINDS = ["f32", "bf16", "q8_0", "q5_1", "q4_0", "kv3_0", "q8_t", "nuq3", "fp8_e5m2_token"]
"""A type of each kind; `test_every_type` has another one beside it."""


def rounding(type_k: str, type_v: str) -> float:
    """Factors of 16 bits, relative to all: what is derived for them is in `test_digits.py`."""
    integers = any(attention_kernels.cache_decoder(name).digits for name in (type_k, type_v))
    return 2**-11 if integers else 0.0


check = partial(check_attention, cpu_attention(), store=store_kv_cpu, rounding=rounding)
check_windows = partial(check_all_windows, cpu_attention(), store=store_kv_cpu, rounding=rounding)


HEAD_DIMS, GROUPS = (32, 48, 64, 80, 96, 128, 256), (1, 2, 3, 5, 8, 16)


@pytest.mark.parametrize(
    ("head_dim", "group"),
    quick(product(HEAD_DIMS, GROUPS), {*product(HEAD_DIMS, (3,)), *product((96,), GROUPS)}),
)
def test_shapes(head_dim: int, group: int) -> None:
    """Few rows, and (with groups of 3 and more) the tiles of a block that is not full."""
    check(head_dim=head_dim, n_kv_heads=2, group=group, lengths=[(9, 1), (0, 7)])


@pytest.mark.parametrize("group", quick((95, 96, 97, 112, 128, 193, 512), (96, 97, 193)))
def test_groups_beyond_a_block(group: int) -> None:
    """The rows of one token alone take several blocks of the prefill kernels."""
    assert BLOCK_ROWS == 96
    for lengths in ([(300, 1)], [(70, 2), (0, 1), (3, 5)]):
        check(head_dim=32, n_kv_heads=2, group=group, lengths=lengths, type_k="q8_0", window=65)


@given(n_new=st.integers(1, 300), group=st.integers(1, 400))
def test_blocks_hold_every_row_once(n_new: int, group: int) -> None:
    blocks = row_blocks(7, n_new, group, 0)
    assert all(0 < block.n_rows <= BLOCK_ROWS for block in blocks)
    rows = [
        (block.token - 7) * group + block.row + i for block in blocks for i in range(block.n_rows)
    ]
    assert sorted(rows) == list(range(n_new * group))


@pytest.mark.parametrize(
    ("n_new", "type_k"),
    quick(product((3, 37), NAMES), {*product((3,), NAMES), (37, "f16"), (37, "q5_1")}),
)
def test_every_type(type_k: str, n_new: int) -> None:
    """K's and V's types do not meet in any kernel, so each is tested once on either side."""
    type_v = NAMES[(NAMES.index(type_k) + 4) % len(NAMES)]
    lengths = [(300, n_new), (0, n_new), (15, n_new)]
    check(head_dim=96, n_kv_heads=2, group=2, lengths=lengths, type_k=type_k, type_v=type_v)


@pytest.mark.parametrize("group", quick((1, 2, 3, 4, 5, 7, 8, 16), (1, 5)))
def test_shapes_of_integer_types(group: int) -> None:
    """Tiles of every size take other numbers of groups of tokens at once."""
    types = "q4_0", "q5_1", "q8_0"
    for head_dim, type_k in zip((32, 96, 256), types, strict=True):
        lengths = [(270, 1), (0, 1), (32, 1), (90, 1)]
        check(head_dim=head_dim, n_kv_heads=2, group=group, lengths=lengths, type_k=type_k)


@pytest.mark.parametrize(
    ("type_k", "type_v"),
    quick(NEW_PAIRS, {(k, v) for k, v in NEW_PAIRS if (NAMES.index(k) + NAMES.index(v)) % 9 == 0}),
)
def test_scales_of_rows_and_heads(type_k: str, type_v: str) -> None:
    """With other types on the other side, decode and prefill in one batch."""
    lengths = [(260, 1), (20, 19)]
    check(head_dim=32, n_kv_heads=2, group=1, lengths=lengths, type_k=type_k, type_v=type_v)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1024, 1025, 5000])
def test_lengths_around_groups_tiles_and_pages(length: int) -> None:
    check(head_dim=32, n_kv_heads=1, group=1, lengths=[(length - 1, 1)], type_v="f16")
    if length > 40:
        check(head_dim=32, n_kv_heads=1, group=1, lengths=[(length - 40, 40)], type_v="f16")


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 256, 300, 5000])
def test_window(window: int) -> None:
    check_windows(window=window, softcap=0.0)


@pytest.mark.parametrize("chunk", [1, 2, 64, 100, 256, 300, 5000])
def test_chunk(chunk: int) -> None:
    """A token sees from the last multiple of it on, as in Llama 4."""
    check_windows(chunk=chunk)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap: float) -> None:
    check_windows(window=0, softcap=softcap)
    check_windows(window=100, softcap=softcap)


@pytest.mark.parametrize("alibi", [2.0, 8.0])
@pytest.mark.parametrize("lengths", WINDOWED_LENGTHS)
def test_bias_by_distance(lengths: list[tuple[int, int]], alibi: float) -> None:
    """Heads of a power of two, and others."""
    for group in (2, 3):
        for pair in (("q8_0", "f16"), ("f16", "f16")):
            check(
                head_dim=64,
                n_kv_heads=2,
                group=group,
                lengths=lengths,
                type_k=pair[0],
                type_v=pair[1],
                alibi=alibi,
            )


def test_a_bias_by_distance_reads_one_segment() -> None:
    with pytest.raises(UsageError, match="one segment"):
        check(head_dim=64, n_kv_heads=2, group=2, lengths=[(50, 1)], bounds=(0, 10), alibi=8.0)


def test_rows_without_keys() -> None:
    check_rows_without_keys(cpu_attention(), store_kv_cpu)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    head_dim=st.sampled_from([32, 80, 128, 256]),
    group=st.integers(1, 16),
    past=st.integers(0, 900),
    n_new=st.integers(1, 50),
    window=st.integers(1, 700),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_windows_of_any_shape(
    head_dim: int, group: int, past: int, n_new: int, window: int, softcap: float
) -> None:
    check(
        head_dim=head_dim,
        n_kv_heads=1,
        group=group,
        lengths=[(past, n_new), (past // 2, 1)],
        type_k="f16",
        type_v="f16",
        window=window,
        softcap=softcap,
    )


def test_rows_before_the_window_are_not_read() -> None:
    """Neither pages nor tiles of a page; they may hold anything, NaN too."""
    cache = torch_cache(
        n_layers=1, n_kv_heads=1, head_dim=32, segments=[SegmentSpec("f32", "f32")], n_ctx=1024
    )
    layer, sequence = cache.layers[0], cache.new_sequence()
    for n_new in (900, 1, 40):
        batch = cache.batch([(sequence, [0] * n_new)], generated=n_new == 1)
        rows = torch.randn(n_new, 1, 32)
        store_kv_cpu(rows, rows, layer, batch.segments)
        sequence.length += n_new
        if n_new == 900:
            for plane in (*layer.segments[0].k, *layer.segments[0].v):
                plane[sequence.pages[0][:2]] = 0xFF
                plane[sequence.pages[0][2], :, :64] = 0xFF  # the first row that is seen is 601
        else:
            args = layer.segments[0], batch.segments[0], batch
            out, _ = cpu_attention()(rows, *args, AttentionParams(1.0, window=300))
            assert out.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=15, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), min_size=1, max_size=4),
    bounds=st.sampled_from([(0,), (0, 1), (0, 4, 260), (0, 256, 512)]),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
)
def test_ragged_batches(
    threads: int,
    lengths: list[tuple[int, int]],
    bounds: tuple[int, ...],
    n_kv_heads: int,
    group: int,
) -> None:
    before = n_threads()
    use_threads(threads)
    try:
        check(head_dim=32, n_kv_heads=n_kv_heads, group=group, lengths=lengths, bounds=bounds)
    finally:
        use_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_pages_hold_the_bytes_of_the_reference(name: str) -> None:
    """In another order: rows stored at once or one by one are restored to what `encode` gives."""
    fmt = TOKEN_FORMATS[name]
    cache = torch_cache(
        n_layers=1, n_kv_heads=3, head_dim=64, segments=[SegmentSpec(name, name)], n_ctx=512
    )
    layer = cache.layers[0]
    segment = layer.segments[0]
    for plane in (*segment.k, *segment.v):
        plane.random_(0, 256)
    rows = torch.randn(300, 3, 64, generator=torch.Generator().manual_seed(0))
    sequence = cache.new_sequence()
    for start, end in ((0, 250), (250, 251), (251, 252), (252, 300)):
        batch = cache.batch([(sequence, [0] * (end - start))])
        store_kv_cpu(rows[start:end], rows[start:end] * 2, layer, batch.segments)
        sequence.length = end
    for side, planes, factor in (("k", segment.k, 1.0), ("v", segment.v, 2.0)):
        wanted = encode(fmt, rows * factor)
        restored = pool_planes(fmt, side, planes)
        for fact, plane, want in zip(fmt.all_planes, restored, wanted, strict=True):
            got = plane[sequence.pages[0]].transpose(1, 2).flatten(0, 1)[:300]
            assert torch.equal(got, want), fact.name


def test_few_new_tokens_have_no_kernels_of_their_own() -> None:
    kernels = attention_kernels.score_kernel, attention_kernels.weigh_kernel
    few = partial(check, head_dim=32, n_kv_heads=1, group=4, type_k="q8_0", type_v="f16")
    few(lengths=[(20, 1)])
    compiled = [kernel.cache_info().misses for kernel in kernels]
    for n_new in (2, 3, 4):
        few(lengths=[(20, n_new)])
    assert [kernel.cache_info().misses for kernel in kernels] == compiled


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("pair", [("f16", "f16"), ("bf16", "fp8_e4m3_token"), ("f16", "q8_0")])
def test_tiles_of_many_tokens_have_the_bits_of_one(group: int, pair: tuple[str, str]) -> None:
    """Rows of several tokens fill larger tiles where their kernels add up in the same order."""
    n, past = 2 * MAX_ROWS + 3, 500  # over the end of a page
    cache = torch_cache(
        n_layers=1, n_kv_heads=2, head_dim=64, segments=[SegmentSpec(*pair)], n_ctx=600
    )
    layer, sequence, run = cache.layers[0], cache.new_sequence(), cpu_attention()
    generator = torch.Generator().manual_seed(group)
    rows = torch.randn(past + n, 2, 64, generator=generator)
    first = cache.batch([(sequence, [0] * (past + n))])
    store_kv_cpu(rows, rows.flip(0), layer, first.segments)
    q = torch.randn(n, 2 * group, 64, generator=generator)

    def attended(start: int, end: int) -> torch.Tensor:
        sequence.length = past + start
        batch = cache.batch([(sequence, [0] * (end - start))], generated=True)
        params = AttentionParams(0.125)
        return run(q[start:end], layer.segments[0], batch.segments[0], batch, params)[0]

    one_by_one = torch.cat([attended(i, i + 1) for i in range(n)])
    assert torch.equal(attended(0, n), one_by_one)


@pytest.mark.parametrize(
    "params", [{}, {"window": 300}, {"chunk": 512}, {"softcap": 20.0}, {"alibi": 8.0}]
)
@pytest.mark.parametrize(
    ("pair", "sizes", "past"),
    [
        (("f16", "f16"), (64, 2, 3), 450),  # head_dim, KV heads, group; over the end of a page
        (("f16", "fp8_e5m2"), (48, 1, 5), 0),
        (("bf16", "f32"), (16, 8, 1), 3800),  # over the length from which on parts have two pages
        (("f16", "f16"), (80, 2, 24), 200),
    ],
)
def test_blocks_of_tokens_have_the_bits_of_one(
    pair: tuple[str, str],
    sizes: tuple[int, int, int],
    past: int,
    params: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of many generated tokens share decoded tiles; what is added up is the same."""
    (head_dim, n_kv_heads, group), n = sizes, BLOCK_ROWS + 7
    launched, run_worker = list[str](), packed_attention.run
    monkeypatch.setattr(
        packed_attention, "run", lambda name, *job: (launched.append(name), run_worker(name, *job))
    )
    segments = [SegmentSpec(*pair)]
    cache = torch_cache(
        n_layers=1, n_kv_heads=n_kv_heads, head_dim=head_dim, segments=segments, n_ctx=past + n
    )
    layer, sequence, run = cache.layers[0], cache.new_sequence(), cpu_attention()
    generator = torch.Generator().manual_seed(group)
    rows = torch.randn(past + n, n_kv_heads, head_dim, generator=generator)
    first = cache.batch([(sequence, [0] * (past + n))])
    store_kv_cpu(rows, rows.flip(0), layer, first.segments)
    q = 3 * torch.randn(n, n_kv_heads * group, head_dim, generator=generator)

    def attended(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        sequence.length = past + start
        batch = cache.batch([(sequence, [0] * (end - start))], generated=True)
        wanted = AttentionParams(0.125, **params)
        return run(q[start:end], layer.segments[0], batch.segments[0], batch, wanted)

    alone = [attended(i, i + 1) for i in range(n)]
    one_by_one = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    assert set(launched) == {"attention/decode"}
    for start, end in ((0, n), (5, 40), (40, n)):
        launched.clear()
        for got, want in zip(attended(start, end), one_by_one, strict=True):
            assert torch.equal(got, want[start:end])
        assert launched == ["attention/many"]


def test_head_dims_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        check(head_dim=24, n_kv_heads=1, group=1, lengths=[(0, 1)])


AVX512 = "+avx512f,+avx512bw,+avx512vl,+avx512dq"


@pytest.mark.parametrize(
    ("features", "digits"),
    [
        ("+avx2,+fma,+f16c", False),
        (f"{AVX512},+avx512vnni", False),
        (f"{AVX512},+avx512vbmi", False),
        (f"{AVX512},+avx512vnni,+avx512vbmi", True),
    ],
)
def test_what_codes_are_multiplied_as_is_told(features: str, digits: bool) -> None:
    """By the type and by what the CPU has."""
    program = """
from localkv.kernels.cpu.cpu_backend import tiles_method
from localkv.quant_formats import TOKEN_FORMATS
for name in ("f16", "fp8_e4m3_token", "q8_0", "q4_1", "iq4_nl"):
    print(name, *(tiles_method(TOKEN_FORMATS[name], side).words[:12] for side in "KV"))
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    integers = "8-bit codes " if digits else "float32"
    assert run.stdout.splitlines() == [
        *(f"{name} float32 float32" for name in ("f16", "fp8_e4m3_token")),
        *(f"{name} {integers} {integers}" for name in ("q8_0", "q4_1", "iq4_nl")),
    ], run.stderr


def test_compiled_kernels_are_found_again(tmp_path: Path) -> None:
    """A second process compiles nothing, and does without Numba."""
    program = """
import sys
from localkv.kernels.cpu.jit import specialize
from localkv.kernels.cpu.attention.kernels import decode_v_kernel, score_kernel
from localkv.kernels.cpu.jit.kernel_source import KernelSource
compiled = []
compile = KernelSource.compile
def counted(self):
    compiled.append(self.template)
    return compile(self)
KernelSource.compile = counted
addresses = [score_kernel("f16", 2), decode_v_kernel("f16")]
for name in ("store/store_rows", "jit/helpers"):
    addresses += specialize.specialized(KernelSource(name)).values()
assert all(addresses)
print(len(compiled), "numba" in sys.modules)
"""
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    env["LOCALKV_CPU"] = "native"  # the package carries none for that
    said = []
    for _ in range(2):
        command = [sys.executable, "-c", program]
        said.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True))
    assert [done.stdout.strip() for done in said] == ["4 True", "0 False"]


@pytest.fixture
def no_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can be written to the folder of compiled kernels, nor read from it."""

    def forget() -> None:
        kernel_folder.usable_folder.cache_clear()
        specialized.cache_clear()
        for kernel in ("score_kernel", "weigh_kernel", "decode_k_kernel", "decode_v_kernel"):
            getattr(attention_kernels, kernel).cache_clear()

    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_folder, "cache_folder", lambda: tmp_path / "file" / "kernels")
    forget()
    yield
    forget()


@pytest.mark.usefixtures("no_cache_folder")
def test_a_cache_that_cannot_be_written_costs_time_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(head_dim=32, n_kv_heads=1, group=1, lengths=[(20, 1)])
    assert len(caplog.records) == 1
    assert "can't be written" in caplog.text


@pytest.mark.parametrize("names", quick([KINDS, NAMES], (), [KINDS]), ids=len)
@pytest.mark.long
def test_without_avx512(names: Sequence[str], tmp_path: Path) -> None:
    """The kernels as code for a CPU with AVX2: right, and no register is too wide."""
    paths = os.pathsep.join(sys.path)
    env = os.environ | HASWELL | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, __file__, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    check(head_dim=64, n_kv_heads=1, group=3, lengths=[(300, 1), (0, 20)], type_k="f16")
    check(head_dim=80, n_kv_heads=1, group=2, lengths=[(90, 20)], type_k="f16", type_v="f16")
    for name in sys.argv[1:]:
        test_every_type(name, 2)
    check_windows(window=70, softcap=5.0)
    codes = [
        (compiled, getattr(module, compiled)._library.get_asm_str())
        for module in list(sys.modules.values())
        for compiled in ("worker", "score", "weigh", "decode_tile")
        if module.__name__.startswith("localkv_") and hasattr(module, compiled)
    ]
    assert {compiled for compiled, _ in codes} == {"worker", "score", "weigh", "decode_tile"}
    assert not any("zmm" in code for _, code in codes)
    assert any("ymm" in code for _, code in codes)
