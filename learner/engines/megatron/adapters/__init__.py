"""Low-rank adapters on Megatron's linear layers, the same as on the layers that transformers has in their place."""
