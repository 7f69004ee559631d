"""One small table per kind of model: its weights, and the names of its configuration in Megatron."""
