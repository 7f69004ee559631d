"""Roles of the algorithm whose models have processes of their own, as the learner sees them."""
