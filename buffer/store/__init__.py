"""Typed commands over Redis: the only code that knows keys, payloads and scripts of a table."""
