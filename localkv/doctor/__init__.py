"""The checks of `localkv doctor`: whether a machine has everything that localkv needs.

    finding.py     a check's result, and `examine`, which keeps checks independent
    probe.py       imports possibly broken packages in a child; its facts as JSON
    software.py    Python and the packages that localkv names as its own needs
    processor.py   the CPU's vector instructions
    gpu.py         torch, Triton, the C compiler it needs, the GPU and its driver
    memory.py      memory of the machine and the limit of a container
    storage.py     caches, sessions and free disk
    all_checks.py  the list

Nothing here writes to disk or makes a request, and none of the heavy packages is imported into the
process that asks.
"""
