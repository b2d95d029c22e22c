"""The sampler chain: from logits to the next token, with llama.cpp's names, order and meaning.

`table` names the samplers and `params` holds their settings: both are for any module to read, and
import no NumPy. The other modules compute.
"""
