"""Sessions of clients, and how a call is found to continue an earlier one."""
