"""Executable specification of the Lua scripts. Tests alone import it, and compare it with Redis command by command."""
