"""Scorers of mathematics: by value, by spelling and by DAPO's rule, and how answers are read and compared by value."""
