"""Values that a configuration may not hold: secrets, and engine arguments on which a run relies."""
