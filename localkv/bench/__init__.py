"""How fast a model runs: prompts, generation and both, at several context depths.

Tests, their names and their repetitions follow llama.cpp's `llama-bench`
(`tools/llama-bench/llama-bench.cpp`), so that tables can be laid side by side.
"""
