"""A model's folder: its location, and checks of its files before anything is loaded."""
