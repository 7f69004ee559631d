"""The places of a run's processes: devices and threads of each, and who takes turns on the same ones."""
