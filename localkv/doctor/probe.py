"""Facts that only heavy packages can tell, from a process of its own.

A package that is broken can do more than raise: it can end the process or hang. So it is imported
by a child (`python -m localkv.doctor.probe NAME...`), which prints one line of JSON per probe.
Probes of one child share its imports; facts that a child could not report are an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from localkv.errors import LocalKVError
from localkv.system.python_child import child_command, child_environment

TIMEOUT_SECONDS = 60.0


def torch_facts() -> dict[str, Any]:
    """torch's version, and the devices it was built for."""
    import torch

    torch.zeros(2).add(1)  # its libraries work, not only its Python files
    return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}


def triton_facts() -> dict[str, Any]:
    import triton

    return {"version": triton.__version__}


def gpu_facts() -> dict[str, Any]:
    """GPUs as torch sees them, and whether the GPU backend can use the first."""
    import torch

    from localkv.kernels.gpu.device import start_triton
    from localkv.kernels.select import why_no_gpu

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(
            {"name": properties.name, "capability": capability, "bytes": properties.total_memory}
        )
    reason, remedy = why_no_gpu()
    facts: dict[str, Any] = {"devices": devices, "reason": reason, "remedy": remedy}
    if not reason:
        try:
            start_triton()
        except LocalKVError as error:
            facts |= {"failure": error.message, "failure_hint": error.hint}
    return facts


def cpu_facts() -> dict[str, Any]:
    """Vector instructions that kernels are compiled for, and Numba's version."""
    import numba

    from localkv.simd.cpu_features import (
        FEATURES,
        HAS_AVX512,
        HAS_VNNI,
        IS_X86,
        byte_dots,
        vector_width,
    )

    return {
        "numba": numba.__version__,
        "x86": IS_X86,
        "vectors": vector_width(),
        "byte_dots": byte_dots(),
        "avx2": "avx2" in FEATURES,
        "avx512": HAS_AVX512,
        "vnni": HAS_VNNI,
        "avx512_bf16": "avx512bf16" in FEATURES,
    }


PROBES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "triton": triton_facts,
    "gpu": gpu_facts,
    "cpu": cpu_facts,
}


class ProbeError(LocalKVError):
    """A probe without facts: the exception it raised, or how its process ended."""


class Probes:
    """A child that runs some probes, from now on. `facts` waits for it."""

    def __init__(self, *names: str) -> None:
        self._answers: dict[str, dict[str, Any]] = {}
        self._end = ""
        command = [*child_command("localkv.doctor.probe"), *names]
        self._thread = threading.Thread(target=self._run, args=(command,), daemon=True)
        self._thread.start()

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_SECONDS,
                env=child_environment(),
            )
        except subprocess.TimeoutExpired as error:
            out, self._end = error.stdout or b"", f"no answer within {TIMEOUT_SECONDS:.0f} s"
        except OSError as error:
            out, self._end = b"", f"{sys.executable}: {error.strerror}"
        else:
            out, self._end = done.stdout, _ending(done)
        for line in out.splitlines():
            answer = json.loads(line)
            self._answers[answer.pop("probe")] = answer

    def facts(self, name: str) -> dict[str, Any]:
        """The facts of a probe.

        Raises:
            ProbeError: nothing.
        """
        self._thread.join()
        answer = self._answers.get(name, {"error": self._end})
        if "error" in answer:
            raise ProbeError(answer["error"])
        facts: dict[str, Any] = answer["facts"]
        return facts


def _ending(done: subprocess.CompletedProcess[bytes]) -> str:
    """How a child ended that did not say all."""
    words = done.stderr.decode(errors="replace").strip().splitlines()
    last = f": {words[-1]}" if words else ""
    if done.returncode < 0:
        try:
            return f"it ended by {signal.Signals(-done.returncode).name}{last}"
        except ValueError:
            return f"it ended by signal {-done.returncode}{last}"
    return f"it ended with code {done.returncode}{last}"


def _main(names: list[str]) -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries' prints must not mix with the answers
    for name in names:
        try:
            answer: dict[str, Any] = {"facts": PROBES[name]()}
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")}
        print(json.dumps({"probe": name, **answer}), file=out, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
