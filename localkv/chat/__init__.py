"""Conversations: messages, what a chat asks of an engine, storage. Nothing here draws anything, and
nothing runs a model."""
