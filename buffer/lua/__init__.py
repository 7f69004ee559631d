"""The verbs, as Lua. See `buffer.redis_backend.scripts`."""
