"""The tiny byte-level MLA model and its block drafter: training, loading, decoding."""
