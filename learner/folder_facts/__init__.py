"""Facts of a model's folder by names, headers and paths; nothing heavy is imported."""
