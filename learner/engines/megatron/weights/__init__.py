"""Megatron's tensors as boxes of full tensors under their Hugging Face names: read, exported and saved."""
