"""Prompts with images as vision-language models see them: kinds of models, their inputs, positions, embeddings."""
