"""Where the KV profile of a model is: beside its file, or in the user's data folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from localkv.cache.profile import read_profile
from localkv.errors import UsageError, printable
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.model_fingerprint import model_hash

if TYPE_CHECKING:
    from localkv.cache.profile import KVProfile

SUFFIX = ".kv.json"
AUTO = "auto"


def beside(model: str | os.PathLike[str]) -> Path:
    """The name of a profile beside a model's file: MODEL.kv.json for MODEL.gguf."""
    return Path(model).with_suffix(SUFFIX)


def in_data_folder(digest: str) -> Path:
    """The name of a profile in the platform's data folder (~/.local/share/localkv on Linux)."""
    from platformdirs import user_data_path

    return user_data_path("localkv", appauthor=False) / "profiles" / f"{digest}{SUFFIX}"


def find_profile(gguf: GGUFFile) -> Path | None:
    """The file of a model's profile, if there is one."""
    near = beside(gguf.path)
    if near.is_file():
        return near
    kept = in_data_folder(model_hash(gguf))
    return kept if kept.is_file() else None


def model_profile(gguf: GGUFFile, name: str | os.PathLike[str]) -> KVProfile:
    """The profile of a model.

    Args:
        name: a file, or "auto", which looks for one.

    Raises:
        UsageError: there is none, or it is damaged, or of another model.
    """
    path = find_profile(gguf) if name == AUTO else Path(name)
    if path is None:
        raise UsageError(
            f"there is no KV profile of {printable(gguf.path.name)}, neither beside it nor in "
            f"{printable(in_data_folder('').parent)}",
            hint="localkv calibrate -m MODEL measures one, in some minutes",
        )
    profile = read_profile(path)
    if profile.model != model_hash(gguf):
        raise UsageError(
            f"the KV profile {printable(path)} is of another model, "
            f"{printable(profile.name)} ({printable(profile.architecture)})",
            hint="localkv calibrate -m MODEL measures this one",
        )
    return profile


def profile_path(model: str | os.PathLike[str]) -> Path | None:
    """The file of the profile of a model's file, if there is one."""
    return find_profile(open_gguf(model))
