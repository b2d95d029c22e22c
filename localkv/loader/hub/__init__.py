"""Models by name, from Hugging Face or its cache on this machine.

`reference` reads a name, `find` looks for the model and `download` fetches it. Nothing is imported
here: to read a name, or to open a file, takes none of the rest.
"""
