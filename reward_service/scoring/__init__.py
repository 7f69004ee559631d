"""Scoring in one process: the functions for each item, and the threads and event loop that run them."""
