"""Folders that localkv reads and writes: are they writable, how full are they."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from localkv.doctor.finding import Finding
from localkv.errors import byte_size, counted

LITTLE_DISK = 5 << 30


def check_kernel_cache() -> Finding:
    """Kernels that Numba compiled."""
    from localkv.kernels.cpu.jit.kernel_folder import cache_folder, is_ours_alone

    folder = cache_folder()
    hint = "kernels are compiled at every start; XDG_CACHE_HOME=FOLDER takes another folder"
    finding = _compiled("kernel cache", folder, hint)
    if finding.status == "ok" and folder.exists() and not is_ours_alone(folder.stat()):
        summary = f"{folder} is not used: others may write to it"
        hint = f"kernels are compiled at every start; chmod go-w {folder}, if it is yours"
        return Finding("kernel cache", "warning", summary, hint, finding.facts)
    return finding


def check_triton_cache() -> Finding:
    """Kernels that Triton compiled."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    hint = "the GPU's kernels can't be kept; TRITON_CACHE_DIR=FOLDER takes another folder"
    return _compiled("Triton cache", folder, hint)


def _compiled(name: str, folder: Path, hint: str) -> Finding:
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    facts = {"path": str(folder), "bytes": n_bytes, "writable": _writable(folder)}
    if not facts["writable"]:
        return Finding(name, "warning", f"{folder} can't be written", hint, facts)
    return Finding(name, "ok", f"{folder}, {_size(n_bytes)}", None, facts)


def check_models() -> Finding:
    """Hugging Face's cache, and room for more."""
    from localkv.loader.hub.cache import cache_folder, cached_models, partial_bytes
    from localkv.loader.hub.client import is_offline

    folder = cache_folder()
    models = cached_models()
    partial = partial_bytes()
    n_bytes = sum(item.model.n_bytes for item in models)
    free = shutil.disk_usage(_existing(folder)).free
    facts: dict[str, Any] = {
        "path": str(folder),
        "models": len(models),
        "bytes": n_bytes,
        "interrupted_bytes": partial,
        "free": free,
        "writable": _writable(folder),
        "offline": is_offline(),
    }
    summary = f"{folder}, {counted(len(models), 'model')}, {_size(n_bytes)}; "
    summary += f"{byte_size(free)} free on disk"
    if partial:
        summary += f"; {byte_size(partial)} of interrupted downloads"
    if facts["offline"]:
        summary += "; HF_HUB_OFFLINE is set"
    if not facts["writable"]:
        hint = "no model can be fetched; HF_HOME=FOLDER takes another folder"
        return Finding("model cache", "warning", f"{summary}; can't be written", hint, facts)
    if free < LITTLE_DISK:
        hint = "localkv rm makes room; HF_HOME=FOLDER takes another disk"
        return Finding("model cache", "warning", summary, hint, facts)
    return Finding("model cache", "ok", summary, None, facts)


def check_sessions() -> Finding:
    """The file of chat's sessions, which is only read."""
    from localkv.chat.database import SCHEMA_VERSION, SQLITE_ERRORS, damage_of, version_of
    from localkv.chat.store import default_path

    path = default_path()
    facts: dict[str, Any] = {"path": str(path), "sessions": None}
    hint = "chat needs it; localkv chat --sessions FILE names another"
    if not _writable(path.parent) or (path.exists() and not os.access(path, os.W_OK)):
        return Finding("sessions", "warning", f"{path} can't be written", hint, facts)
    if not path.exists():
        return Finding("sessions", "info", f"none yet, {path}", None, facts)
    if not path.is_file():
        return Finding("sessions", "warning", f"{path} is not a file", hint, facts)
    repair = "localkv chat --repair saves everything that can be read, and keeps the damaged file"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            version = version_of(db)
            if version > SCHEMA_VERSION:
                return Finding(
                    "sessions", "warning", f"{path}: made by a newer localkv", hint, facts
                )
            damage = damage_of(db)
            (n_sessions,) = db.execute("SELECT COUNT(*) FROM sessions").fetchone()
    except SQLITE_ERRORS as error:
        return Finding("sessions", "warning", f"{path}: {error}", repair, facts)
    if damage:
        return Finding("sessions", "warning", f"{path} is damaged: {damage}", repair, facts)
    facts |= {"sessions": n_sessions, "bytes": path.stat().st_size, "private": _private(path)}
    summary = f"{path}, {counted(n_sessions, 'session')}, {byte_size(facts['bytes'])}"
    if not facts["private"]:
        hint = f"the next localkv chat closes it to them, if it is yours; or chmod go= {path}"
        return Finding("sessions", "warning", f"{summary}; others may read it", hint, facts)
    return Finding("sessions", "ok", summary, None, facts)


def _private(path: Path) -> bool:
    from localkv.chat.database import SIDECARS, is_private

    files = (Path(f"{path}{suffix}") for suffix in SIDECARS)
    return all(is_private(file) for file in (path, path.parent, *files) if file.exists())


def _size(n_bytes: int) -> str:
    return byte_size(n_bytes) if n_bytes else "empty"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _writable(folder: Path) -> bool:
    """Whether files can be made there, or the folder itself where it does not exist."""
    nearest = _existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
