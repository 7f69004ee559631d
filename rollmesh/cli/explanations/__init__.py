"""The configuration and its algorithm in words, for `rollmesh config`."""
