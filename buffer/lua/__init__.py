"""The scripts, one command each. See `buffer.redis_backend.scripts`."""
