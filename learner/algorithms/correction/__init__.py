"""Off-policy correction: what is done about tokens that another policy sampled."""
