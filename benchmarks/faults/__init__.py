"""The mesh while services die, freeze or are cut off."""
