"""Small pieces of device code for the GPU's kernels that Triton lacks or compiles badly.

    fence.py      keeps the compiler from decoding a tile once per warp
    unpack.py     packed integers -> fp16, without conversion instructions
    bit_fields.py the same where a code's bits lie in two places
    saturate.py   values that must stay finite
    float_bits.py fp8 and bf16 <-> wider floats, by their bits

Everything is `@triton.jit`. Functions that take `PTX` have two bodies with the same results: plain
Triton (False: for the interpreter and for GPUs that aren't NVIDIA's), and PTX (True).

Nothing above this floor but the GPU files of `formats` and
`kernels.gpu` may import it or Triton: elsewhere a start without a GPU would pay for them.
"""
