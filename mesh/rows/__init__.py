"""Rows of data files, for every service that reads some."""
