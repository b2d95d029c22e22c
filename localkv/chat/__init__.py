"""Conversations: messages, engines that answer, storage. Nothing here draws anything.

No module of this package imports what runs a model when it is imported; only `local_engine` does
so, once it loads one.
"""
