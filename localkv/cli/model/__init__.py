"""From the values of options to a model that is ready, and what it takes."""
