"""Policy losses: surrogate objectives per token, before importance weights and aggregation; importing enters them."""
