"""`localkv doctor`: the command, and its parts."""
