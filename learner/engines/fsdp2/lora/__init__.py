"""Low-rank adapters: which layers get one, the values that it begins with, and its product with the base."""
