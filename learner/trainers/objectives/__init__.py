"""The objective of each trainer: its rows, its loss, and what it prepares before the first step."""
