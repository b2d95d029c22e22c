"""A model in a process of its own: what is said to it, its client, and the program that it runs."""
