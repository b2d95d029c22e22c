"""Text that keeps to a JSON schema or a grammar: which tokens may come next.

llguidance does the parsing; it is imported when the first grammar is made.
"""
