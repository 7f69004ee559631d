"""Rewards: cost of isolation, of programs, of models; agreement with the graders of others."""
