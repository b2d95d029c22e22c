"""What localkv needs of a machine, and whether it is there: the checks behind `localkv doctor`.

    finding.py     what a check says, and `examine`, which lets no check take others along
    probe.py       imports what may be broken in a process of its own; its facts as JSON
    software.py    Python and the packages that localkv names as its own needs
    processor.py   the CPU's vector instructions
    gpu.py         torch, Triton, the C compiler it needs, the GPU and its driver
    memory.py      memory of the machine and the limit of a container
    storage.py     caches, sessions and free disk
    all_checks.py  the list

Nothing here writes to disk or makes a request, and none of the heavy packages is imported into the
process that asks.
"""
