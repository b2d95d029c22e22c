"""Types that others beat for all layers are not measured by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model
from localkv.quality.kv_profile import MARGIN, Plan, Tried, measure, try_types, worth_measuring
from support.random_model import RandomModel

IDS = np.random.default_rng(3).integers(96, size=120).tolist()


def test_a_type_is_left_out_if_one_of_its_size_or_less_costs_clearly_less() -> None:
    tried = {
        "large": Tried(9, 1.0),
        "beaten by its like": Tried(5, 2 * MARGIN + 0.1),
        "its like": Tried(5, 2.0),
        "hardly worse": Tried(6, 2 * MARGIN - 0.1),
        "beaten by a smaller one": Tried(7, 2 * MARGIN + 0.1),
        "small": Tried(3, 50.0),
    }
    assert worth_measuring(tried) == ["large", "its like", "hardly worse", "small"]


def test_only_types_that_fit_are_tried(tmp_path: Path) -> None:
    model = load_model(RandomModel().write(tmp_path / "m.gguf"), cpu_backend())[0]
    (group,) = model.config.groups
    n = len(group.layers) * group.n_kv_heads
    tried = try_types(model.config, ["q8_0", "fp8_e4m3"], 1, lambda name: float(len(name)))
    sizes = {"q8_0": n * group.value_dim * 34 // 32, "fp8_e4m3": n * group.value_dim}
    assert {name: one.size for name, one in tried.items()} == {
        name: size for name, size in sizes.items() if group.value_dim % 32 == 0 or name != "q8_0"
    }


def test_a_profile_without_types_that_others_beat(tmp_path: Path) -> None:
    """It is the same, but for types that no list has anyway, and takes fewer runs."""
    model = load_model(RandomModel(n_layers=3).write(tmp_path / "m.gguf"), cpu_backend())[0]
    types = ("f16", "q8_0", "q5_1", "q4_0", "fp8_e5m2")
    profiles, runs = [], []
    for leaves_out in (False, True):
        plan = Plan(types, (4.5, 6.5, 8.5), n_ctx=120, leaves_out=leaves_out)
        steps = list[tuple[int, int]]()
        profile = measure(
            model,
            [IDS, IDS[::-1]],
            plan,
            digest="",
            text="random",
            on_step=lambda done, of, what, to=steps: to.append((done, of)),  # type: ignore[misc]
        )
        profiles.append(profile)
        runs.append(len(steps))
        assert [done for done, _ in steps] == list(range(len(steps)))
        assert steps[-1][0] == steps[-1][1]
    assert runs[1] < runs[0]
    assert profiles[0].lists == profiles[1].lists
    for whole, part in zip(profiles[0].layers, profiles[1].layers, strict=True):
        assert whole is not None
        assert part is not None
        assert "fp8_e5m2" not in part.k.kld
        assert {"q8_0", "q4_0"} <= set(part.k.kld)
        assert part.k.kld.items() <= whole.k.kld.items()
    assert profiles[1].uniform[0].layers[0] == ("q8_0", "q8_0")
    assert set(profiles[1].uniform) < set(profiles[0].uniform)
