"""Speculative decoding: tokens are guessed, and several are evaluated for the price of one.

A guess is part of the text if the request's own sampler, with its own random numbers, draws it from
the model's logits. So the text is the one without guesses, byte for byte; they only make it faster.
"""
