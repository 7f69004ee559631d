"""The agreement of both ends of the buffer's wire: limits, framing, leases, side data."""
