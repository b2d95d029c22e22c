"""`localkv show --kv` and `localkv calibrate --plot`: outlier channels, costs, shifts, pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest

from localkv.cache.profile import (
    KVProfile,
    LayerFacts,
    SideFacts,
    TypeList,
    packed_ranges,
    read_profile,
    write_profile,
)
from localkv.commands.kv_view import KVView, Run, Shift, of_profile, outlier_runs, require_rows
from localkv.errors import UsageError
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from support.paths import MODELS
from support.program import Program

sys.path.insert(0, str(MODELS))

from outliers import Outliers, k_factors, v_factors, write_twin

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLANTED = Outliers(k_pairs=2, k_strength=64, v_channels=1, v_strength=64, seed=5)
TEXT = "Once upon a time there was a small fox who lived near the river."
RNG = np.random.default_rng(1)


def side(n_heads: int, n_channels: int, large: dict[tuple[int, int], float]) -> SideFacts:
    """Channels of 1 to 2, but for those that are named; costs by type."""
    values = 1 + RNG.random((n_heads, n_channels)).astype(np.float32)
    for place, value in large.items():
        values[place] = value
    kld = {name: float(10 ** -RNG.uniform(2, 5)) for name in ("q8_0", "q4_0")}
    return SideFacts(n_heads, n_channels, packed_ranges(-values, values / 2), kld)


def made_profile(model: str = "0" * 32) -> KVProfile:
    """A profile of four layers, of which the second keeps no rows."""
    large = {(0, 7): 40.0, (0, 8): 60.0, (1, 31): 30.0}
    layers = (
        LayerFacts(side(2, 64, {}), side(2, 64, {})),
        None,
        LayerFacts(side(2, 64, large), side(2, 64, {})),
        LayerFacts(side(2, 64, {}), side(2, 64, {(1, 0): 20.0})),
    )
    types = (("q4_0", "q8_0"), None, ("q8_0", "q4_0"), ("q4_0", "q4_0"))
    lists = (TypeList(types, 4.9, 100, 1e-3, 2e-3),)
    facts = {"text": "a text", "n_tokens": 64, "n_scored": 31, "kv_rotation": "auto"}
    numbers = {"token_seconds": 0.0, "bandwidth": 0.0, "smoothing": 0.0}
    return KVProfile(
        model, "llama", "made", **facts, **numbers, layers=layers, lists=lists, uniform=()
    )


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    path = tmp_path_factory.mktemp("twin") / "twin.gguf"
    write_twin(tiny_model, path, PLANTED)
    return path


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "made.kv.json"
    write_profile(path, made_profile())
    return path


def test_planted_channels_are_named(program: Program, tiny_model: Path, twin: Path) -> None:
    """In the right layer, head and channel, and so much larger than in the model."""
    found = []
    for path in (tiny_model, twin):
        done = program("show", path, "--kv", "-p", TEXT, "--json")
        assert done.code == 0, done.err
        found.append(json.loads(done.out))
    config = model_spec(open_gguf(tiny_model))
    assert found[1]["n_tokens"] > 10
    for i, (plain, other) in enumerate(zip(found[0]["layers"], found[1]["layers"], strict=True)):
        for of, factors in (("k", k_factors), ("v", v_factors)):
            planted = factors(PLANTED, config, i)
            wanted = np.array(plain[of]["absmax"]) * planted
            np.testing.assert_array_equal(np.array(other[of]["absmax"]), wanted)
            assert plain[of]["outliers"] == []
            named = {(one["head"], one["channel"]) for one in other[of]["outliers"]}
            assert named == {tuple(place) for place in np.argwhere(planted > 1).tolist()}
    assert found[1]["shift"] is None
    text = program("show", twin, "--kv", "-p", TEXT, "--tokens", "12")
    assert "K and V of 12 tokens of the prompt" in text.out
    assert text.err_lines[-1].startswith("note: the first 12 of ")
    channels = np.flatnonzero(k_factors(PLANTED, config, 1)[0] > 1)
    (row,) = (line for line in text.out.splitlines() if line.startswith("layer 1 K"))
    assert f"head 0: {channels[0]}-{channels[1]} (" in row


def test_layers_of_different_widths() -> None:
    """A layer with fewer heads, or with latents beside short rotated keys, leaves cells empty."""
    pytest.importorskip("matplotlib")
    from localkv.commands.kv_plot import figure

    layers = (
        LayerFacts(side(1, 96, {(0, 90): 50.0}), side(1, 32, {})),
        LayerFacts(side(2, 64, {}), side(1, 32, {})),
    )
    drawn = figure(KVView("a$\\frac$\n", "b", 9, 0.5, layers, sides=("latents", "rotated keys")))
    k, v = [axes for axes in drawn.axes if axes.images][:2]
    assert (k.get_xlabel(), v.get_xlabel()) == ("channel, head after head", "channel")
    assert k.get_title(loc="left") == "latents"
    table = k.images[0].get_array()
    assert table.mask.sum(1).tolist() == [32, 0]
    np.testing.assert_array_equal(table[0][:96], layers[0].k.channel_absmax[0])
    assert [text.get_text() for text in k.texts] == ["90"]
    assert drawn.get_suptitle().endswith("smoothed by 0.5")


def test_runs_of_channels() -> None:
    facts = side(2, 64, {(0, 62): 50.0, (0, 63): 80.0, (1, 0): 60.0, (1, 2): 70.0})
    runs = outlier_runs(facts)
    assert [(run.head, run.name) for run in runs] == [(0, "62-63"), (1, "0"), (1, "2")]
    assert runs[0].times == pytest.approx(80 / np.median(facts.channel_absmax[0]), rel=1e-6)
    assert Run(0, 3, 3, 7.0).name == "3"


def a_view() -> KVView:
    profile = made_profile()
    moved = [
        None if one is None else RNG.random((4, 300)).astype(np.float32) for one in profile.layers
    ]
    view = of_profile(profile)
    return KVView(
        view.name, view.text, 64, 0.0, view.layers, chosen=view.chosen,
        shift=Shift("q4_0/q4_0", tuple(moved)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def picture() -> tuple[KVView, Figure]:
    pytest.importorskip("matplotlib")
    from localkv.commands.kv_plot import figure

    view = a_view()
    return view, figure(view)


def test_the_figure_has_the_numbers(picture: tuple[KVView, Figure]) -> None:
    view, figure = picture
    maps = [axes for axes in figure.axes if axes.images]
    tables = [axes.images[0].get_array() for axes in maps]
    assert [axes.get_xlabel() for axes in maps] == [
        *["KV head, 64 channels each"] * 2,
        *["layer"] * 2,
        "head",
        "position of the token, each column the mean of 3",
    ]
    bars = [axes.get_ylabel() for axes in figure.axes if not axes.images]
    assert bars[:2] == ["largest |value|", "mean KLD from f16 (nats)"]
    for at, of in enumerate("kv"):
        sides = [getattr(layer, of) for _, layer in view.rows]
        absmax = [facts.channel_absmax.reshape(-1) for facts in sides]
        np.testing.assert_array_equal(tables[at], absmax)
        kld = [[facts.kld[name] for facts in sides] for name in ("q8_0", "q4_0")]
        np.testing.assert_allclose(tables[2 + at], kld, rtol=1e-6)
    assert view.shift is not None
    moved = [one for one in view.shift.by_layer if one is not None]
    np.testing.assert_allclose(tables[4], [100 * one.mean(1) for one in moved], rtol=1e-5)
    worst = max(moved, key=lambda one: float(one.mean()))
    np.testing.assert_allclose(tables[5][:, 7], 100 * worst[:, 21:24].mean(1), rtol=1e-5)
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ["0", "2", "3"]


def test_the_figure_names_outliers_and_chosen_types(picture: tuple[KVView, Figure]) -> None:
    """Beside their cells: rows are layers 0, 2 and 3, columns the channels of both heads."""
    _, figure = picture
    k, v, cost_k, cost_v = [axes for axes in figure.axes if axes.images][:4]
    named = {text.get_text(): (round(text.xy[0]), round(text.xy[1] + 0.5)) for text in k.texts}
    assert set(named) == {"7\N{EN DASH}8", "31"}
    assert named["31"][1] == named["7\N{EN DASH}8"][1] == 1
    assert named["31"][0] in (64 + 30, 64 + 32)
    assert [text.get_text() for text in v.texts] == ["0"]
    frames = [
        [(round(p.get_x() + 0.5), round(p.get_y() + 0.5)) for p in axes.patches]
        for axes in (cost_k, cost_v)
    ]
    assert frames == [[(0, 1), (1, 0), (2, 1)], [(0, 0), (1, 1), (2, 1)]]


@pytest.mark.slow
def test_a_profile_is_drawn_without_a_model(
    program: Program, profile_file: Path, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    from localkv.commands.kv_plot import WIDTH

    png, svg = tmp_path / "kv.png", tmp_path / "kv.SVG"
    done = program("show", profile_file, "--kv", "--plot", png)
    assert (done.code, done.err) == (0, "")
    assert "layer 2 K  head 0: 7-8 (" in done.out
    worst = max(
        (layer.k.kld["q4_0"], i) for i, layer in of_profile(read_profile(profile_file)).rows
    )
    (row,) = (line for line in done.out.splitlines() if line.startswith("q4_0 "))
    assert f"layer {worst[1]} {worst[0]:.1e}" in row
    with image.open(png) as opened:
        assert opened.format == "PNG"
        assert opened.width == round(150 * WIDTH)
        assert len(set(opened.convert("L").tobytes())) > 50
    assert program("show", profile_file, "--kv", "--json", "--plot", svg).code == 0
    words = " ".join(ElementTree.parse(svg).getroot().itertext())
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "localkv" not in words  # no path of this machine


@pytest.mark.slow
def test_attention_and_the_profile_of_a_model(
    program: Program, tiny_model: Path, tmp_path: Path
) -> None:
    from localkv.loader.model_fingerprint import model_hash

    plot = tmp_path / "kv.png"
    asked = ("show", tiny_model, "--kv", "-p", TEXT, "-ctk", "q4_0", "-ctv", "q8_0", "--plot", plot)
    done = program(*asked, "--json")
    assert done.code == 0, done.err
    shift = json.loads(done.out)["shift"]
    assert shift["types"] == "q4_0/q8_0"
    assert all(0.001 < one["mean"] < one["p99"] <= one["most"] for one in shift["layers"])
    assert plot.stat().st_size > 10_000
    text = program(*asked).out
    assert "attention with q4_0/q8_0: how far its output moves from f16's" in text
    path, measured = tmp_path / "own.kv.json", tmp_path / "calibrated.svg"
    run = ("--tokens", "64", "--types", "q8_0,q4_0", "--bits", "5,6.5", "--smooth", "0")
    run += ("--kv-tail", "0")
    done = program("calibrate", "-m", tiny_model, *run, "-o", path, "--plot", measured)
    assert done.code == 0, done.err
    assert ElementTree.parse(measured).getroot().tag.endswith("svg")
    profile = read_profile(path)
    assert profile.model == model_hash(open_gguf(tiny_model))
    found = program("show", tiny_model, "--kv", "--kv-profile", path, "--json")
    assert found.code == 0, found.err
    facts = json.loads(found.out)
    assert profile.layers[0] is not None
    assert facts["layers"][0]["k"]["kld"] == dict(profile.layers[0].k.kld)
    assert facts["shift"]["types"].startswith("types by layer of ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-ctk", "q4_0"), "error: --cache-type-k has no effect: without --kv nothing is run"),
        (("--plot", "x.png"), "error: --plot has no effect: without --kv nothing is run"),
        (("--kv", "--template"), "error: --kv and --template show different things, use one"),
        (("--kv", "-p", "a", "-f", "b"), "error: -p and -f both give the text, use one"),
        (("--kv", "--plot", "x.bmp"), "error: --plot x.bmp: not a kind of picture"),
        (("--kv", "--plot", "no/x.png"), "error: no is not a folder"),
        (("--kv", "-f", "none.txt"), "error: the text none.txt: No such file or directory"),
        (("--kv", "--kv-profile", "{profile}"), "error: the KV profile {profile} is of another"),
    ],
)
def test_what_cannot_be_shown(
    program: Program, tiny_model: Path, profile_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = program("show", tiny_model, *(flag.format(profile=profile_file) for flag in flags))
    assert done.code == 2
    assert done.err_lines[0].startswith(said.format(profile=profile_file))


def test_files_that_are_none(program: Program, profile_file: Path, tmp_path: Path) -> None:
    other, damaged = tmp_path / "other.json", tmp_path / "damaged.json"
    other.write_text('{"kind": "something"}')
    damaged.write_text(profile_file.read_text()[:-40])
    assert program("show", other, "--kv").err_lines[0].endswith("other.json: not a KV profile")
    assert program("show", damaged, "--kv").err_lines[0].endswith("not a JSON file")
    assert program("show", tmp_path / "none.gguf", "--kv").code != 0
    done = program("show", profile_file, "--kv", "-p", "a text")
    assert done.code == 2
    assert "--prompt has no effect" in done.err
    assert "is shown without a model" in done.err
    with pytest.raises(UsageError, match="this model keeps no K and V"):
        require_rows((None, None))


def test_without_matplotlib_there_is_a_hint(
    program: Program, profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.util import find_spec

    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    done = program("show", profile_file, "--kv", "--plot", tmp_path / "kv.png")
    assert done.err_lines == ["error: --plot needs matplotlib", "hint: pip install 'localkv[plot]'"]
