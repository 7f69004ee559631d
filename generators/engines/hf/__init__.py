"""The `hf` engine: continuous batching around the forward pass of any Hugging Face causal language model."""
