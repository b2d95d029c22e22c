"""The screen of `localkv chat`, on Textual.

It speaks to an engine through messages and values: nothing here loads a model or imports torch.
"""
