"""What a packed cache changed: a generated text, evaluated once more through an f16 cache."""
