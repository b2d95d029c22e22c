"""The KV cache: its bytes, pages and sequences, and the scales of fp8 types by head."""
