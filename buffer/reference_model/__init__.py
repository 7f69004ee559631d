"""Executable specification of the Lua scripts. Only tests import it, and compare it with Redis command by command."""
