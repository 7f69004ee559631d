"""The conformance kit: `rollmesh reward check`, and the same as one file for people without Rollmesh.

Modules here import little else of Rollmesh, for `build.py` puts all of it into that file. It is the messages of the
contract, and the checks that the client makes of every answer.
"""
