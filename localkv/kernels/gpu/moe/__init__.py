"""Routed experts: who goes where, and products with stacks of matrices."""
