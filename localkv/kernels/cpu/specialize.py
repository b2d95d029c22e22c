"""Kernels that are compiled once per parameter value and stay compiled across processes.

Numba's disk cache finds a function by its module's file and notices changes of that file only. So
a specialised kernel is a generated file: the source of an ordinary module with some text replaced,
in a folder of the user's cache, named by a hash of itself and of everything it is built on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import sys
import tempfile
import types
from pathlib import Path

import platformdirs

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_BUILT_ON = (
    "simd/*.py",
    "quant_formats/cpu_cache/*.py",
    "kernels/cpu/attention_job.py",
    "kernels/cpu/attention_queries.py",
    "kernels/cpu/attention_sizes.py",
    "kernels/cpu/softmax.py",
    "kernels/cpu/page_row.py",
    "kernels/cpu/panel_bytes.py",
    "kernels/cpu/rotation.py",
    "kernels/cpu/linear_*.py",
    "quant_formats/__init__.py",
    "quant_formats/bits.py",
)


@functools.cache
def _foundation() -> bytes:
    """A hash of the sources that every kernel may be built on."""
    digest = hashlib.sha256()
    for pattern in _BUILT_ON:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("localkv")) / "kernels"


@functools.cache
def _writable_folder() -> Path | None:
    """The folder of generated kernels, or None (said once) if nothing can be written there."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        logger.warning("kernels are compiled at every start: cannot write %s (%s)", folder, error)
        return None


@functools.cache
def specialized(template: str, *replacements: tuple[str, str]) -> types.ModuleType:
    """The module `localkv.kernels.cpu.<template>` with other constants.

    Args:
        template: a module whose functions are compiled with `cache=CACHE`.
        replacements: (text, replacement) pairs; each text occurs exactly once in the template.
    """
    source = (_PACKAGE / "kernels" / "cpu" / f"{template}.py").read_text(encoding="utf-8")
    folder = _writable_folder()
    for old, new in (*replacements, ("CACHE = False", f"CACHE = {folder is not None}")):
        if source.count(old) != 1:
            raise ValueError(f"{template}: {old!r} occurs {source.count(old)} times")
        source = source.replace(old, new)
    key = hashlib.sha256(_foundation() + source.encode()).hexdigest()[:16]
    name = f"localkv_{template}_{key}"
    if folder is None:
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
        return module
    path = folder / f"{name}.py"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(temporary, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
