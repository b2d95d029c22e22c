"""Files in other types of weights: their bytes are llama-quantize's."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.errors import LocalKVError, ModelFileError, UsageError
from localkv.loader import gguf_copy
from localkv.loader.gguf_file import open_gguf
from localkv.loader.importance import read_importance
from localkv.loader.quantised_format import (
    FILE_TYPES,
    Mixture,
    ModelFacts,
    TypeChoices,
    file_type_name,
    write_order,
)
from localkv.loader.quantize import Request, check_goal, plan_quantization, write_files
from localkv.quant_formats import FORMATS
from support.paths import DATA, MODELS
from support.quantize_models import SHAPES, write_importance

LLAMA_CPP = json.loads((DATA / "llama_cpp_quantize.json").read_text())
TALES = MODELS / "tales-4M-F16.gguf"
OFTEN = ("Q4_0", "F16", "BF16", "F32")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def made(out: Path, request: Request, model: Path = TALES) -> bytes:
    plan = plan_quantization(open_gguf(model), request)
    check_goal(plan, out)
    write_files(plan, out, 2)
    return out.read_bytes()


@pytest.fixture
def tales_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    tensors = open_gguf(TALES).tensors.values()
    write_importance(Path("tales.dat"), {x.name: x.shape[-1] for x in tensors if len(x.shape) == 2})
    return "tales.dat"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param(
            name, key, marks=[pytest.mark.exhaustive] * (name not in OFTEN or key == "weighted")
        )
        for name, by_key in LLAMA_CPP["files"].items()
        for key in by_key
    ],
)
def test_files_are_llama_quantizes(
    tmp_path: Path, tales_importance: str, name: str, key: str
) -> None:
    importance = read_importance(tales_importance) if key == "weighted" else None
    data = made(tmp_path / "out.gguf", Request(TypeChoices(name), importance))
    assert digest(data) == LLAMA_CPP["files"][name][key]


@pytest.mark.parametrize("shape_name", SHAPES)
def test_mixtures_are_llama_quantizes(shape_name: str) -> None:
    shape = SHAPES[shape_name]
    facts = ModelFacts(
        shape.architecture, shape.n_layers, shape.n_experts, shape.n_head, shape.n_head_kv
    )
    tensors = dict(shape.tensors())
    names = write_order(list(tensors))
    for name, by_key in LLAMA_CPP["mixtures"][shape_name].items():
        for key, expected in by_key.items():
            mixture = Mixture(facts, TypeChoices(name, has_importance=key == "weighted"), names)
            chosen = []
            for tensor in names:
                now = FORMATS["f32" if len(tensors[tensor]) == 1 else "f16"]
                chosen.append(f"{tensor} {mixture.format_of(tensor, tensors[tensor], now).name}")
            assert digest("\n".join(sorted(chosen)).encode()) == expected, (name, key)


def test_a_type_of_files_has_a_name_an_alias_and_a_number() -> None:
    assert file_type_name("q4_k") == "Q4_K_M"
    assert file_type_name("15") == "Q4_K_M"
    assert file_type_name("Q4") is None
    assert len({kind.number for kind in FILE_TYPES.values()}) == len(FILE_TYPES)


def small_model(path: Path, **tensors: np.ndarray) -> Path:
    """A model of one layer that has only these further tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_name("Grüße")
    writer.add_array("some.words", ["a", "", "c"])
    for name, values in tensors.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matrix(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def test_values_that_are_no_numbers_or_too_large_are_refused(tmp_path: Path) -> None:
    for value, said in ((np.nan, "not finite"), (-np.inf, "not finite"), (1e9, "too large for q4")):
        x = matrix(40, 64)
        x[33, 7] = value
        model = small_model(tmp_path / "model.gguf", blk__0__ffn_up__weight=x)
        with pytest.raises(ModelFileError, match=said):
            made(tmp_path / "out.gguf", Request(TypeChoices("Q4_0")), model)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    plan = plan_quantization(open_gguf(TALES), Request(TypeChoices("Q4_0")))

    def interrupt(done: int, total: int, name: str) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_files(plan, out, 2, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert out.read_bytes() == b"old"


def test_the_model_itself_is_not_overwritten(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model.gguf", blk__0__ffn_up__weight=matrix(16, 64))
    plan = plan_quantization(open_gguf(model), Request(TypeChoices("Q4_0")))
    (tmp_path / "link.gguf").hardlink_to(model)
    for name in ("model.gguf", "link.gguf"):
        with pytest.raises(UsageError, match="is the model itself"):
            check_goal(plan, tmp_path / name)


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_quantization(open_gguf(TALES), Request(TypeChoices("Q4_0")))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(LocalKVError, match="has 1000 B left, and the file takes 2"):
        check_goal(plan, tmp_path / "out.gguf")


def test_what_is_rounded_already_is_refused(tmp_path: Path) -> None:
    model = open_gguf(MODELS / "tales-4M-Q8_0.gguf")
    with pytest.raises(UsageError, match="is of type q8_0, which is rounded already"):
        plan_quantization(model, Request(TypeChoices("Q4_0")))
    plan = plan_quantization(model, Request(TypeChoices("Q4_0"), allow_requantize=True))
    write_files(plan, tmp_path / "out.gguf", 1)
    assert open_gguf(tmp_path / "out.gguf").tensors["blk.0.attn_q.weight"].format.name == "q4_0"


def test_a_small_type_needs_importance() -> None:
    model = open_gguf(TALES)
    with pytest.raises(UsageError, match=r"q2_K, the type of tensor .* needs an importance matrix"):
        plan_quantization(model, Request(TypeChoices("Q2_K_S")))
    plan_quantization(model, Request(TypeChoices("Q2_K_S"), is_trial=True))


def test_patterns_and_types_of_single_tensors() -> None:
    choices = TypeChoices(
        "Q4_0",
        output=FORMATS["q5_0"],
        token_embedding=FORMATS["bf16"],
        patterns=[
            (re.compile("attn_[kv]"), FORMATS["q8_0"]),
            (re.compile("attn"), FORMATS["q5_1"]),
        ],
    )
    plan = plan_quantization(open_gguf(TALES), Request(choices))
    chosen = {item.goal.name: item.goal.format.name for item in plan.conversions}
    assert chosen["token_embd.weight"] == "bf16"
    assert chosen["blk.1.attn_k.weight"] == chosen["blk.1.attn_v.weight"] == "q8_0"
    assert chosen["blk.1.attn_q.weight"] == "q5_1"
    assert chosen["blk.1.ffn_up.weight"] == "q4_0"
    assert chosen["blk.1.attn_norm.weight"] == "f32"
    pure = plan_quantization(open_gguf(TALES), Request(TypeChoices("Q4_K_M", pure=True)))
    assert {item.goal.format.name for item in pure.conversions} == {"f32", "q4_K"}


def test_a_copy_has_all_keys_and_tensors(tmp_path: Path) -> None:
    made(tmp_path / "out.gguf", Request(None))
    old, new = open_gguf(TALES), open_gguf(tmp_path / "out.gguf")
    old_keys, new_keys = (gguf_copy.read_keys(x.path) for x in (old, new))
    del new_keys["general.quantization_version"]
    assert new_keys == {key: x for key, x in old_keys.items() if key in new_keys}
    assert set(old.tensors) == set(new.tensors)
    for name in old.tensors:
        assert (old.data(name) == new.data(name)).all()


def test_layers_are_left_out(tmp_path: Path) -> None:
    made(tmp_path / "out.gguf", Request(None, pruned=[1, 2]))
    old, new = open_gguf(TALES), open_gguf(tmp_path / "out.gguf")
    assert new.metadata.integer("llama.block_count") == 3
    assert len([name for name in new.tensors if name.endswith("attn_q.weight")]) == 3
    assert (new.data("blk.1.attn_q.weight") == old.data("blk.3.attn_q.weight")).all()
    with pytest.raises(UsageError, match="there is no layer 5: the model has 5"):
        plan_quantization(old, Request(None, pruned=[5]))


def test_parts_are_kept(tmp_path: Path) -> None:
    tensors = {f"blk__{i}__ffn_up__weight": matrix(16, 64) + i for i in range(3)}
    for number, names in enumerate((["blk__0__ffn_up__weight"], list(tensors)[1:])):
        path = tmp_path / f"in-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(3)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 3)
        for name in names:
            writer.add_tensor(name.replace("__", "."), tensors[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    model = tmp_path / "in-00001-of-00002.gguf"
    plan = plan_quantization(open_gguf(model), Request(TypeChoices("Q4_0"), keep_split=True))
    write_files(plan, tmp_path / "out.gguf", 2)
    new = open_gguf(tmp_path / "out-00002-of-00002.gguf")
    assert [new.tensors[f"blk.{i}.ffn_up.weight"].part for i in range(3)] == [0, 1, 1]
    made(tmp_path / "joined.gguf", Request(TypeChoices("Q4_0")), model)
    joined = open_gguf(tmp_path / "joined.gguf")
    assert "split.count" not in joined.metadata
    for name in joined.tensors:
        assert (joined.data(name) == new.data(name)).all()


def test_keys_are_copied_as_they_are(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model.gguf", blk__0__ffn_up__weight=matrix(16, 64))
    made(tmp_path / "out.gguf", Request(TypeChoices("Q4_0")), model)
    metadata = open_gguf(tmp_path / "out.gguf").metadata
    assert metadata.string("general.name") == "Grüße"
    assert metadata.strings("some.words") == ["a", "", "c"]
    assert metadata.integer("general.file_type") == 2


# -- importance matrices


def write_gguf_importance(path: Path, name: str, sums: np.ndarray, counts: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "none")
    writer.add_array("imatrix.datasets", ["a.txt", "b.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
    writer.add_tensor(f"{name}.counts", counts.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sums_are_divided_by_the_counts_of_each_expert(tmp_path: Path) -> None:
    sums, counts = np.array([[2.0, 4], [3, 9], [5, 5]]), np.array([[2.0], [3], [0]])
    path = write_gguf_importance(tmp_path / "i.gguf", "blk.0.ffn_up_exps.weight", sums, counts)
    found = read_importance(str(path))
    assert (found.datasets, found.n_chunks) == (["a.txt", "b.txt"], 7)
    by_expert = found.of("blk.0.ffn_up_exps.weight", (3, 8, 2))
    assert by_expert is not None
    assert by_expert.tolist() == [[1, 2], [1, 3], [1, 1]]
    with pytest.raises(ModelFileError, match=r"6 values for tensor .* which has 2 x 2 columns"):
        found.of("blk.0.ffn_up_exps.weight", (2, 8, 2))
    assert found.of("other.weight", (8, 2)) is None
    assert not found.only([], ["ffn_up"]).columns
    assert found.only(["ffn_up"], []).columns


def test_experts_are_rounded_with_the_importance_of_each(tmp_path: Path) -> None:
    x, name = matrix(3, 16, 64), "blk.0.ffn_up_exps.weight"
    sums = np.random.default_rng(1).random((3, 64)) ** 3 * 100
    path = write_gguf_importance(tmp_path / "i.gguf", name, sums, np.full((3, 1), 4))
    model = small_model(tmp_path / "model.gguf", blk__0__ffn_up_exps__weight=x)
    choices = TypeChoices("Q4_0", pure=True)
    made(tmp_path / "out.gguf", Request(choices, read_importance(str(path))), model)
    together = open_gguf(tmp_path / "out.gguf").data(name)
    for i in range(3):
        alone = write_gguf_importance(
            tmp_path / "one.gguf", "blk.0.ffn_up.weight", sums[i : i + 1], np.full((1, 1), 4)
        )
        one = small_model(tmp_path / "model.gguf", blk__0__ffn_up__weight=x[i])
        made(tmp_path / "out.gguf", Request(choices, read_importance(str(alone))), one)
        assert (open_gguf(tmp_path / "out.gguf").data("blk.0.ffn_up.weight") == together[i]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_importance_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    path = write_gguf_importance(tmp_path / "i.gguf", "a", np.full((1, 4), value), np.ones((1, 1)))
    with pytest.raises(ModelFileError, match="not finite"):
        read_importance(str(path))


def test_a_model_is_no_importance_matrix() -> None:
    with pytest.raises(UsageError, match="not an importance matrix"):
        read_importance(str(TALES))


def _legacy() -> bytes:
    head = struct.pack("<i", 1) + struct.pack("<i", 3) + b"abc" + struct.pack("<ii", 2, 2)
    return head + struct.pack("<ff", 4, 6) + struct.pack("<ii", 5, 1) + b"d"


def test_the_former_format(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(_legacy())
    found = read_importance(str(path))
    assert found.columns["abc"].tolist() == [2, 3]
    assert (found.n_chunks, found.datasets) == (5, ["d"])


@given(cut=st.integers(1, len(_legacy())), place=st.integers(0, 40), byte=st.integers(0, 255))
def test_damaged_files_of_the_former_format(
    tmp_path_factory: pytest.TempPathFactory, cut: int, place: int, byte: int
) -> None:
    data = bytearray(_legacy()[:cut])
    if place < len(data):
        data[place] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.dat"
    path.write_bytes(bytes(data))
    try:
        found = read_importance(str(path))
    except ModelFileError:
        return
    assert all(np.isfinite(values).all() for values in found.columns.values())
