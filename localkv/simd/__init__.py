"""Explicit SIMD values inside Numba-compiled functions: the floor under the CPU's kernels.

Numba does not vectorise decoding well, but it can be directed: a Numba type may be backed by an
LLVM vector, and an intrinsic may emit any LLVM instruction. A vector has 16 lanes on every CPU;
LLVM splits it where registers are narrower (two ymm without AVX-512).

    kinds.py        names for the types of arguments
    vector.py       the types F32x16, I32x16 and Mask16, and how code for them is generated. Tuples
                    of vectors that stay in registers: accumulators of small matrix products
    cpu_features.py the CPU that kernels are compiled for, and whether threads can sleep on Linux's
                    futex, without importing Numba
    memory.py       loads that convert, stores, prefetch, scalars at an address, an atomic counter,
                    named tuples
    arithmetic.py   lane-wise arithmetic, comparisons and selection, exp, tanh, logarithms, roots,
                    rounding to halves, sums over lanes
    integer.py      nibbles, look-up of bytes in a table of 16, dot products of bytes and of bfloats
    shuffle.py      shuffles; 16 rows of words become vectors of columns; look-up of floats in
                    memory, and of bytes in large tables
    quads.py        four bytes a lane: transposed loads, products with integers of three bytes, and
                    the weights of a page's tokens as such integers
    atomic.py       atomics, pauses, the futex and the time, for threads in compiled code

Memory is addressed by a *base* (a NumPy array or an integer address) and an *index* that counts
items of the kind that is read or written, with any type of the array. Nothing is checked.
"""

LANES = 16
"""Lanes of a vector, on every CPU; LLVM splits a vector where registers are narrower."""
