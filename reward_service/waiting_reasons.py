"""Words in reasons of waits by which readers of heartbeats know the cause.

A reason with one of these means that responses fail; with neither, they only wait.
"""

from __future__ import annotations

# Begins a generator's reason. The services and their errors come after it.
NO_SERVICE_ANSWERS = "no reward service answers"
# Stands between a function's name and its time limit, in the reason of the member that scores.
DID_NOT_RETURN = "did not return within"
