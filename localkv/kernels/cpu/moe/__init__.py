"""Routed experts on the CPU: who sees which token, and products with stacks of matrices."""
