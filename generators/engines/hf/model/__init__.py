"""The `hf` engine's model: loading, the layers that are served, its forward passes."""
