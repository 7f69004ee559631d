"""Rules over the records of a run: where its time went, what it lost, and how the policy learned."""
