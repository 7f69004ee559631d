"""The conformance kit: `rollmesh reward check`, and the same as one file for people without Rollmesh.

Modules here import only what `build.py` puts into that file: this package, the messages of the contract, and the checks
that the client makes of every answer.
"""
