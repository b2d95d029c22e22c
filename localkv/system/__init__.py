"""The machine and the process: memory, processors, limits, files, signals and children."""
