"""Memory of a rank under the Megatron-Core engine: stages, activations in flight, and layouts to choose from."""
