"""`localkv serve`: a model for programs that speak HTTP."""
