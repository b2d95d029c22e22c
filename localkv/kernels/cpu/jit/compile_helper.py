"""The process that compiles kernels for another one (see `specialize`).

A request is a line of JSON, [template, parameters]; the answer is the packed machine code, after
its length in 8 bytes.
"""

from __future__ import annotations

import json
import os
import sys

from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.machine_code import pack


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be written there
    for line in sys.stdin:
        source = KernelSource(*json.loads(line))
        data = pack(source.name, source.compile())
        answers.write(len(data).to_bytes(8, "little") + data)
        answers.flush()


if __name__ == "__main__":
    main()
