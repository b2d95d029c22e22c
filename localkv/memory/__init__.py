"""The memory of a model and its cache, whether it fits, and advice on settings that would."""
