"""`localkv plan`: the command, and its parts."""
