"""`localkv show`: the command, and its parts."""
