"""The preparation of a model before it trains: the ranks over which it is sharded, and compiled layers."""
