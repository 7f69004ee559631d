"""Single services under load: the generator's endpoint, the reward service."""
