"""Full tensors as processes hold them in parts, whatever the engine: how they leave, and how they are saved."""
