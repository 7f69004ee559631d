"""Costs of driving a foreign engine, and of new weights while it decodes."""
