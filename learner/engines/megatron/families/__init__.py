"""One small table per kind of model: its weights, and what its configuration is called in Megatron."""
