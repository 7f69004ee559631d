"""`python -m rollmesh`: the command."""

from rollmesh.cli.app import main

main()
