"""f16: IEEE half precision, 2 bytes a value (ggml's `ggml_half`)."""
