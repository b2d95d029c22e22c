"""The sampler chain: from logits to the next token, with llama.cpp's names, order and meaning.

`params` names the samplers and holds their settings; any module may read it, and it imports no
NumPy. The other modules compute.
"""
