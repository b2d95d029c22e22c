"""Explicit SIMD values inside Numba-compiled functions: the floor under the CPU's kernels.

Numba does not vectorise decoding well, but it can be directed: a Numba type may be backed by an
LLVM vector, and an intrinsic may emit any LLVM instruction. A vector has 16 lanes on every CPU;
LLVM splits it where registers are narrower (two ymm without AVX-512).

    kinds.py        names for the types of arguments
    vector.py       the types F32x16, I32x16 and Mask16, and how code for them is generated
    cpu_features.py the CPU that kernels are compiled for, without importing Numba
    lanes.py        how many lanes a vector has, without it, too
    futex.py        whether threads can sleep on Linux's futex, without it, too
    memory.py       loads that convert, stores, prefetch, scalars at an address, an atomic counter
    arithmetic.py   lane-wise arithmetic, comparisons and selection, exp, sums over lanes
    exponential.py  powers of two, tanh
    registers.py    instructions of one CPU, a register at a time
    byte_dots.py    8-bit dot products, with what each CPU has for them
    bfloat_dots.py  dot products of pairs of bfloats
    byte_tables.py  look-up of bytes in a table of 16
    integer.py      nibbles, and the last two for compiled functions
    transpose.py    16 rows of words become vectors of columns
    quads.py        four bytes a lane: transposed loads, products with integers of three bytes
    atomic.py       atomics, pauses and the futex, for threads in compiled code
    vector_tuple.py tuples of vectors that stay in registers: accumulators of small matrix products

Memory is addressed by a *base* (a NumPy array or an integer address) and an *index* that counts
items of the kind that is read or written, with any type of the array. Nothing is checked.
"""
