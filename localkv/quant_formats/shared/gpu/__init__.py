"""How a GPU reads and writes each type: Triton functions that kernels take as constants.

Cache types: rows of K and V in pages

Pages have the pool's own layout: a plane is uint8 [pages, KV heads, 256, blocks, bytes]. So the
rows of a page and head are one piece of memory, and a *row* is numbered as if all were one list:
(page * n_kv_heads + head) * 256 + offset. `<folder>/gpu.py` holds

    PRODUCT        how a tile is multiplied: "fp16", or as fp32, where fp16's range is too small:
                   "tf32", which is exact for bf16, or "tf32x3", in three products
    UNIT           what a tile's values are to be multiplied with, 1 if the file has none.
    columns(WIDTH) -> the channels that the two halves of a tile hold, int32 [WIDTH / 2] each
    read_tile(planes, first_row, valid, HEAD_DIM, WIDTH, PTX) -> two halves [rows, WIDTH / 2]
    write_rows(planes, rows, valid, x, HEAD_DIM, WIDTH)

Tiles come in halves because a byte of a 4-bit type holds two values, at a distance of 16 channels.
Nothing has to be interleaved if queries and outputs are addressed accordingly. WIDTH is the power
of two (at least 64) that HEAD_DIM is padded to; the padding reads as 0.

`read_tile` reads the rows from `first_row` on (int64, the first of a tile within a page); those
that aren't `valid` (bool [rows]) become 0, with any bytes. `write_rows` packs fp32
`x` [rows, WIDTH] into the `valid` ones of `rows` (int64) with the bytes of the format's own
`encode`, save for the bits of a NaN.

Weight types: a plane for each field

A file's blocks interleave codes and scales in 18, 22, 34, ... bytes, which a GPU can only load two
bytes at a time. So a matrix is laid out for the GPU when it is loaded. Each field has a *plane* of
its own, with codes in runs of 16 bytes, which one thread loads at once. Nothing is lost, and
nothing but padding is added. `<folder>/gpu.py` holds a `LAYOUT`; kernels take its `read` as a
compile-time argument, so no type has a kernel of its own.
"""
