"""What other services import of the buffer: unary calls with retries, and the standing streams."""
