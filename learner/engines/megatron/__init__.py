"""The Megatron-Core engine: tensor, pipeline, context and expert parallel models. See docs/training-engines.md."""
