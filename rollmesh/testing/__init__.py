"""Suites of tests for parts that others provide: a training engine proves itself by `rollmesh.testing.contract`."""
