"""The conventions of both ends of the buffer's protocol: limits, framing, leases, side data."""
