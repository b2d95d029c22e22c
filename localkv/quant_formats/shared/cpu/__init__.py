"""How the CPU reads and writes each type: facts, and what Numba compiles.

A process whose kernels are compiled imports no Numba. So the facts by which memory is laid out for
kernels are in `<folder>/__init__.py`, beside the reference. What kernels are made of is in
`<folder>/cpu.py`, which only templates of kernels import.

Cache types: rows of K and V in pages

A *unit* is the result of one decoder call: one vector of 16 values (types without blocks) or two
(types with blocks of 32: values i and i + 16 of 16 tokens for K; values 0 to 15 and 16 to 31 of
one token for V). A page's bytes are ordered so that a unit's bytes are consecutive on either side
(`page_order.py`). `__init__.py` holds

    BLOCK                values per block: 16 or 32
    SCALED, AFFINE       value = scale * code, + minimum; halves in planes 0 and 1, or in the planes
                         of rows, where SCALED is False
    PLANES               the order of each plane in a page, a `PlaneOrder`
    OFFSET               integer types only: how much too large the codes of `quads` are. With
                         minima, what is taken off codes so that they are about 0, and added to the
                         minima OFFSET-fold scaled. Rounded factors do least harm to small codes

and `cpu.py`

    decode(planes, u)    the codes of unit u as a tuple of BLOCK / 16 F32x16; `planes` are the
                         addresses of four planes, in the format's order; unused ones are 0
    quads(planes, u)     integer types only: the codes of units u to u + 3, of K 4 channels of 16
                         tokens, of V 4 tokens of 16 channels. They are unsigned bytes that are
                         OFFSET too large; values i, then values i + 16, as one I32x16 each, with
                         units in bytes (see `simd/quads.py`).
    encode(x, planes, u) BLOCK floats at x + BLOCK u -> block u of a row; `planes` are the addresses
                         of a row's fields in the format's order, as the pool has them.
    start_row(x, planes, n) types with fields of rows only: writes the fields of n floats, and
                         returns what `encode` then takes as a fourth argument

Types with scales by channel (`shared/channel_groups.py`) have `LAST` in `__init__.py`, the
largest code, and instead of `encode` in `cpu.py`

    pack(codes, planes, u) 32 codes at codes + 32 u, a byte each -> block u of a row

Scale and minimum are applied by the kernel: once per block and token, not per value.

Weight types: panels of 16 rows

A type with blocks has `LAYOUT` in `__init__.py`, a `PanelLayout` (`panel_layout.py`): how a matrix
is laid out in panels. In `cpu.py` it has `PANELS`, a `PanelFormat` (`panel_codes.py`): how codes,
scales and minima are read from them. A type without blocks is multiplied as it lies in the file:
`load_values(b, address)` in `cpu.py` emits the load of 16 values.
file: `load_values(b, address)` in `cpu.py` emits the load of 16 values.
"""
