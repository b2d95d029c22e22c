"""A barrier for the compiler, not for the GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fence(x, PTX: tl.constexpr):
    """`x` (fp16 or fp32), after an empty instruction that Triton can't move or look through.

    Triton likes to move a dot's layout of its operand above the operand's computation. After a
    decoded tile that is a loss: every warp then decodes all of it, from single bytes.
    """
    if PTX:
        if x.dtype == tl.float16:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float16, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x
