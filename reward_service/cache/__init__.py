"""Scores that are kept: equal items get the score that was found for the first of them."""
