"""Control groups: bounds of memory and processes for a sandbox as a whole, on hosts that let a service make some."""
