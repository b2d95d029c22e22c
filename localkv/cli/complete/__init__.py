"""`localkv complete`: the command, and its parts."""
