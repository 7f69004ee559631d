"""The verbs, as Lua. See `buffer.scripts`."""
