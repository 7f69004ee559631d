"""Model folders: odd ones, and what each command answers; written ones, as their users read them."""
