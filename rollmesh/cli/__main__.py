"""`python -m rollmesh.cli`, as the launcher starts the services."""

from rollmesh.cli.app import main

main()
