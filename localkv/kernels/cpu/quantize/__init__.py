"""Making blocks of weights: rows of floats become rows of a type."""
