"""An agent built on the `openai` package alone, trained as it is."""
