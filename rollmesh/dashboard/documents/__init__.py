"""The data of each panel of the page, as JSON: pure functions of a run as it was read."""
