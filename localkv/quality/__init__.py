"""The quality that a cache type costs: perplexity, divergence from a base, and calibration."""
