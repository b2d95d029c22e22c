"""The sampler chain: from logits to the next token, with llama.cpp's names, order and meaning."""

from localkv.sampling.candidates import Candidates
from localkv.sampling.chain import parse_sampler_sequence, parse_samplers
from localkv.sampling.sampler import Sampler

__all__ = ["Candidates", "Sampler", "parse_sampler_sequence", "parse_samplers"]
