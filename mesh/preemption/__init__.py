"""Notices that this machine is about to be taken away: their forms, where they are found, and the watch for them."""
