"""The scorer `judge`: a language model at an OpenAI-compatible endpoint gives the reward."""
