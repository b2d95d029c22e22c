"""Token ids in, token ids out: one sequence at a time, its cache, and drawing from its logits."""
