"""Python, and the packages that localkv needs."""

from __future__ import annotations

import platform
import struct
import sys
from importlib import metadata

from localkv import __version__
from localkv.doctor.finding import Finding

LEAST_PYTHON = (3, 11)


def check_python() -> Finding:
    version = platform.python_version()
    facts = {"version": version, "executable": sys.executable, "localkv": __version__}
    summary = f"{version}, {sys.executable}"
    needed = ".".join(map(str, LEAST_PYTHON))
    if sys.version_info < LEAST_PYTHON:
        return Finding("Python", "broken", summary, f"localkv needs {needed} or newer", facts)
    if struct.calcsize("P") < 8:
        return Finding("Python", "broken", f"{summary}, 32 bits", "a Python of 64 bits", facts)
    return Finding("Python", "ok", summary, None, facts)


def unmet_requirement(name: str) -> str | None:
    """A package's requirement, as in "torch>=2.11", if the installed version does not meet it.

    Requirements of GPUs are among them.
    """
    return _unmet(extra="gpu").get(name)


def check_packages() -> Finding:
    try:
        unmet = _unmet()
    except metadata.PackageNotFoundError:
        return Finding(
            "packages",
            "info",
            "localkv itself is not installed, so nothing says which versions it needs",
            "pip install .",
        )
    except ModuleNotFoundError as error:
        return Finding("packages", "broken", str(error), f"pip install {error.name}")
    facts = {"unmet": sorted(unmet.values())}
    if not unmet:
        return Finding("packages", "ok", f"all that localkv {__version__} needs", None, facts)
    shown = ", ".join(f"{name} {_installed(name) or 'is missing'}" for name in sorted(unmet))
    wanted = " ".join(f"'{what}'" for what in sorted(unmet.values()))
    return Finding("packages", "broken", shown, f"pip install {wanted}", facts)


def check_extras() -> Finding:
    """Packages that only some functions need."""
    found = {name: _installed(name) for name in ("matplotlib", "nvidia-ml-py")}
    what_for = {"matplotlib": "pictures of perplexity", "nvidia-ml-py": "the GPU's driver here"}
    shown = [
        f"{name} {version}" if version else f"no {name} ({what_for[name]})"
        for name, version in found.items()
    ]
    return Finding("extras", "ok" if all(found.values()) else "info", ", ".join(shown), None, found)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(extra: str = "") -> dict[str, str]:
    """Requirements of this platform, and of an extra, that are not met, by package.

    Raises:
        PackageNotFoundError: localkv is not installed.
    """
    from packaging.requirements import Requirement

    unmet = {}
    for line in metadata.requires("localkv") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        version = _installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet[requirement.name] = f"{requirement.name}{requirement.specifier}"
    return unmet
