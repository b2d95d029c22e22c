"""The commands: each a file or a folder of its name; beside them is what several commands share.

`localkv.cli` has the table of commands, and imports one only when it is asked for.
"""
