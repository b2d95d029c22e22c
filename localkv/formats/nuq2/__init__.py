"""nuq2: 2-bit codes of a codebook, a scale, and an outlier of each 64 values."""
