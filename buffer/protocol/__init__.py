"""What both ends of the buffer's wire agree on: limits, framing, leases, side data."""
