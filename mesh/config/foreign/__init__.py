"""Keys of verl and TRL, and what stands for them here."""
