"""What a model and its cache take, what fits, and advice on what would."""
