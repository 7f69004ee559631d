"""One reward of several functions: weights, gates, scales, and what becomes of a part without a score."""
