"""A stored model in the learner's place: published as one version, and asked prompts. Nothing is trained."""
