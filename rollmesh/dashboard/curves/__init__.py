"""Curves of the page: records as columns, their reduction to what a plot can show, and the charts."""
