"""Recurrent layers on a GPU."""
