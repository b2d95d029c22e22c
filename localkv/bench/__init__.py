"""How fast a model runs: prompts, generation and both, behind contexts of several depths.

What is measured, and how tests are named and repeated, is llama.cpp's `llama-bench`
(`tools/llama-bench/llama-bench.cpp`), so that tables can be laid side by side.
"""
