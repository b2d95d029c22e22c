"""Attention that reads packed K and V: decode, prefill and the merge of their parts."""
