"""Programs of agent frameworks, one each, in an environment without rollmesh (`make agent-clients`)."""
