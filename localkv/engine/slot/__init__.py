"""A sequence of the cache that texts use in turn, and the steps that fill its rows."""
