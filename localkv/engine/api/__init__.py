"""The classes that `LLM` is made of: what a model can be asked."""
