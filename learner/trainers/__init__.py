"""Supervised fine-tuning, reward models and preference optimization on the learner's engines."""
