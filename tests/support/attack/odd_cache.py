"""Fills a model cache with what nobody would: names, links, folders in place of files and so on."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from support.fake_hub import COMMIT

_REPOS = (
    "models--org--repo",
    "models--org--two",
    "models--..--..",
    "models--a--b--c",
    "x",
    "blobs",
)
_FOLDERS = ("snapshots", "blobs", "refs", ".locks", "snapshots/main", f"snapshots/{COMMIT}")
_NAMES = (
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "d/m-F16.gguf",
    "x-00001-of-00002.gguf",
    "x-00002-of-00002.gguf",
    "x-00001-of-00000.gguf",
    "main",
    ".gguf",
    "a\nb.gguf",
    "a\x1b[31m.gguf",
    os.fsdecode(b"\xff.gguf"),
    "a" * 64,
    "a" * 64 + ".incomplete",
    "b" * 64,
    "README.md",
    " ",
    "d/d/d",
)


def fill_at_random(random: Random, cache: Path, model: Path, outside: Path) -> None:
    """Make some twenty entries; links lead anywhere, also to the folder `outside`."""
    for _ in range(random.randint(5, 25)):
        place = cache / random.choice(_REPOS) / random.choice(_FOLDERS)
        path = place / random.choice(_NAMES) if random.random() < 0.9 else place
        try:
            if os.path.lexists(path) or not path.resolve().is_relative_to(cache.resolve()):
                continue  # through a link that was made before
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(random, path, model, outside)
        except (OSError, RuntimeError):  # a file is where a folder should be, or a circle
            continue


def _make(random: Random, path: Path, model: Path, outside: Path) -> None:
    targets = (
        path.name,
        "..",
        "../..",
        "../../blobs/" + "a" * 64,
        "../../blobs/none",
        "../../blobs/../../../../outside/important.gguf",
        str(outside),
        str(outside / "important.gguf"),
        "/dev/null",
        "/dev/zero",
        "../../../models--org--two/blobs/" + "b" * 64,
    )
    kind = random.random()
    if kind < 0.35:
        path.symlink_to(random.choice(targets))
    elif kind < 0.5:
        path.hardlink_to(model)
    elif kind < 0.65:
        path.write_bytes(
            random.choice((b"", COMMIT.encode(), b"../../..", b"\xff" * 50, b"GGUF\3"))
        )
    elif kind < 0.75:
        path.mkdir()
    elif kind < 0.8:
        os.mkfifo(path)
    else:
        path.write_bytes(random.randbytes(100))
