"""What a cache type costs: perplexity, divergence from a base, and calibration."""
