"""bf16: the upper half of an IEEE single, 2 bytes a value (ggml's `ggml_bf16_t`)."""
