"""Checkpoints that are complete or absent, copies of them elsewhere, and Hugging Face folders of them."""
