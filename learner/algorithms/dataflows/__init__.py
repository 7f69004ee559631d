"""The dataflows that presets configure: what happens to a group, to a batch, and which losses follow."""
