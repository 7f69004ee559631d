"""Definitions that the scripts share: each script is sent with those that it needs."""
