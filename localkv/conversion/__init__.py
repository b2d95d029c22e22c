"""Hugging Face's checkpoints to GGUF files: what `localkv convert` does."""
