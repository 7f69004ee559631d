"""The off-policy contract as pure functions: they propose what the Lua scripts check again."""
