"""`localkv bench`: the command, and its parts."""
