"""Replacements of CUDA and of Transformer Engine on a CPU."""
