"""The probes, one module for each family; `order.py` has all of them in their order."""
