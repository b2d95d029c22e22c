"""`localkv perplexity`: the command, and its parts."""
