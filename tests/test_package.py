"""What is published: complete, small, and enough to run a model offline without torch."""

from __future__ import annotations

import email
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

SHIPPED = "localkv/models/tales-4M-Q8_0.gguf"

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
    assert wheel.stat().st_size <= 6 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in tracked() if name.startswith("localkv/")}
    assert names == package | {SHIPPED}
    assert "localkv/py.typed" in names


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(name))
    assert set(facts.get_all("Provides-Extra")) == {"dev", "gpu", "plot"}
    assert facts["Author"]
    assert {url.partition(",")[0] for url in facts.get_all("Project-URL")} >= {
        "Homepage",
        "Documentation",
        "Repository",
        "Issues",
        "Changelog",
    }
    assert "](docs/kv-cache-quality.png)" not in facts.get_payload(), "PyPI shows no such picture"
