"""q6_0: 6-bit codes and a scale, `x = d (q - 32)` (ik_llama.cpp's `block_q6_0`, its type 133).

A cache type only: ggml itself, and so GGUF as others read it, has no such type of weights.
"""
