"""The dataflows that presets configure: group stage, batch stage and losses."""
