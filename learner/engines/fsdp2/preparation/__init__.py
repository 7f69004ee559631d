"""The preparation of a model before it trains: blocks, FSDP2, recomputation, compute dtype, compiled layers."""
