"""What is published: complete, small, and enough to run a model offline without torch."""

from __future__ import annotations

import email
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

SHIPPED = "localkv/models/tales-4M-Q8_0.gguf"
CARRIED = "localkv/kernels/cpu/compiled/"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="needs hatchling"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def tracked() -> set[str]:
    """The files of the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    names = done.stdout.decode().split("\0")[:-1]
    return {name for name in names if (ROOT / name).exists()}


def test_the_sdist_has_every_file(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - names == set()
    assert {name for name in names - tracked() if "__pycache__" in name or ".venv" in name} == set()


def test_the_wheel_has_the_package_and_a_model(wheel: Path) -> None:
    """And compiled kernels, a file for each level that was built in this checkout."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.compress_size for item in archive.infolist()}
    names = {name for name in sizes if ".dist-info/" not in name}
    carried = {name for name in names if name.startswith(CARRIED)}
    assert all(sizes[name] <= 2 << 20 for name in carried)
    assert wheel.stat().st_size - sum(sizes[name] for name in carried) <= 6 << 20
    package = {name for name in tracked() if name.startswith("localkv/")}
    assert names - carried == package | {SHIPPED}
    built = (ROOT / CARRIED).glob("*.zip")
    assert carried == {path.relative_to(ROOT).as_posix() for path in built}
    assert "localkv/py.typed" in names


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(name))
    lines = facts.get_all("Requires-Dist")
    heavy = [line for line in lines if line.startswith(("torch", "triton", "nvidia"))]
    assert {line.rpartition("extra == ")[2] for line in heavy} == {"'gpu'", "'dev'"}
    assert set(facts.get_all("Provides-Extra")) == {"dev", "docs", "gpu", "plot", "ray"}
    assert facts["Author"]
    assert {url.partition(",")[0] for url in facts.get_all("Project-URL")} >= {
        "Homepage",
        "Documentation",
        "Repository",
        "Issues",
        "Changelog",
    }
    assert "](docs/kv-cache-quality.png)" not in facts.get_payload(), "PyPI shows no such picture"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel in an environment of its own, with all that this one has but torch and Triton."""
    folder = tmp_path_factory.mktemp("installed")
    others = folder / "others"
    others.mkdir()
    places = [Path(place) for place in sys.path if place.endswith("-packages")]
    for entry in itertools.chain(*(place.iterdir() for place in places if place.is_dir())):
        hidden = ("torch", "triton", "nvidia", "localkv", "__editable__", "_localkv")
        if not entry.name.startswith(hidden) and not (others / entry.name).exists():
            (others / entry.name).symlink_to(entry)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    bin_ = folder / "venv" / "bin"
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(f"{others}\n")
    program = bin_ / "localkv"
    program.write_text(
        f"#!{bin_}/python\nimport sys\nfrom localkv.__main__ import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    yield program
    shutil.rmtree(folder)


def run(program: Path, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """In a folder without models, offline."""
    home = program.parents[2] / "home"
    home.mkdir(exist_ok=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    environment |= {"HF_HUB_OFFLINE": "1", "HOME": str(home), "XDG_CONFIG_HOME": str(home)}
    return subprocess.run(
        [str(program), *argv], cwd=home, env=environment, input=text or "", capture_output=True,
        text=True,
    )  # fmt: skip


def test_it_completes_without_a_model_file(installed: Path) -> None:
    done = run(installed, "complete", "-p", "Once upon a time", "-n", "16", "--temp", "0")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert done.stdout.split()[:3] == ["there", "was", "a"]
    assert "no model is named: using tales-4M-Q8_0, a toy that ships" in done.stderr.splitlines()[0]
    chat = run(installed, "complete", "--chat", "-p", "Hello!", "-n", "8", "-q")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()


def test_it_plans_and_lists_without_torch(installed: Path) -> None:
    model = installed.parents[1] / "lib"
    (path,) = model.glob(f"python*/site-packages/{SHIPPED}")
    for argv in (["plan", "-m", str(path)], ["show", str(path)], ["list"], ["doctor"]):
        done = run(installed, *argv)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "tales-4M-Q8_0.gguf" in run(installed, "list").stdout
    assert "torch          -        not installed" in run(installed, "doctor").stdout


def test_the_reference_needs_torch(installed: Path) -> None:
    done = run(installed, "complete", "-p", "x", "--device", "reference", "-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-2:] == [
        "error: device reference can't be used: torch is not installed",
        "hint: pip install torch",
    ]


@pytest.fixture
def on_a_gpu(installed: Path, tmp_path: Path) -> Path:
    """The program on a machine that has NVIDIA's driver, as far as it can see."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    program = installed.with_name("on-a-gpu")
    path = f"os.environ['PATH'] = '{tmp_path}:' + os.environ['PATH']"
    program.write_text(installed.read_text().replace("import sys\n", f"import os, sys\n{path}\n"))
    program.chmod(0o755)
    return program


def test_a_gpu_without_torch_is_named_at_every_start(on_a_gpu: Path) -> None:
    done = run(on_a_gpu, "complete", "-p", "Once", "-n", "1", "-q")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: the GPU is not used: torch is not installed")
    assert "pip install 'localkv[gpu]'" in line
    shown = run(on_a_gpu, "doctor")
    assert shown.returncode == 0
    assert shown.stdout.count("hint: pip install 'localkv[gpu]'") == 3


def test_a_gpu_that_is_asked_for_needs_torch(on_a_gpu: Path) -> None:
    done = run(on_a_gpu, "complete", "-p", "x", "--device", "cuda", "-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-2:] == [
        "error: device cuda can't be used: torch is not installed",
        "hint: pip install 'localkv[gpu]', or --device cpu",
    ]
