"""The off-policy contract as pure functions and a clock-fed state machine: proposes what the Lua scripts re-check."""
