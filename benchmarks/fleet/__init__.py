"""A fleet of simulated generators on real fronts and a real Redis."""
