"""`localkv serve`: the command, and its parts."""
