"""`localkv doctor`: whether a machine has everything that localkv needs.

Nothing here writes to disk or makes a request, and none of the heavy packages is imported into the
process that asks: `probe` imports them in a child, and `checks` reads its facts.
"""
