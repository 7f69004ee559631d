"""The scorer `judge`: a language model behind an OpenAI-compatible endpoint gives the reward."""
