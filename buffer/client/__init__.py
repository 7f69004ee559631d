"""The part of the buffer that other services import: unary calls with retries, and the standing streams."""
