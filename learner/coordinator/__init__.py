"""Rank 0: takes the run over, gathers and claims batches, trains, publishes, evaluates, leaves."""
