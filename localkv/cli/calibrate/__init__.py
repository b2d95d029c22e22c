"""`localkv calibrate`: the command, and its parts."""
