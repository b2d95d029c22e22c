"""Small pieces of device code for the GPU's kernels that Triton lacks or compiles badly.

    unpack.py     packed integers -> fp16, without conversion instructions; a fence, which keeps the
                  compiler from decoding a tile once per warp.
    float_bits.py fp8 and bf16 <-> wider floats, by their bits; values that must stay finite
    codebooks.py  codes to the numbers of a codebook that is known when a kernel runs
    ptx.py        the instructions of these, as strings

Everything is `@triton.jit`. Functions that take `PTX` have two bodies with the same results: plain
Triton (False: for the interpreter and for GPUs that aren't NVIDIA's), and PTX (True).

Nothing above this floor but the GPU files of `quant_formats` and
`kernels.gpu` may import it or Triton: elsewhere a start without a GPU would pay for them.
"""
