"""A model's folder: its location, checks of its files, and its weights, read in parts and written tensor by tensor."""
