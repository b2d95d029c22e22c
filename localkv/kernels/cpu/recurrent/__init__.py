"""Recurrent layers on the CPU: convolutions over the last tokens, and memories that take in one."""
