"""Agents as programs of a user's own, which talk to the OpenAI server of their generator."""
