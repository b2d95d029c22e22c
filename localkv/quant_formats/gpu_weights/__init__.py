"""How each weight type lies in a GPU's memory, and how a kernel reads a tile of it.

A file's blocks interleave codes and scales in 18, 22, 34, ... bytes, which a GPU can only load two
bytes at a time. So a matrix is laid out anew when it is loaded: each field in a *plane* of its own,
codes in runs of 16 bytes, which one thread loads at once. Nothing is lost, and nothing but padding
is added. One file per type holds a `LAYOUT`; kernels take its `read` as a compile-time argument, so
no type has a kernel of its own.
"""
