"""HTTP servers of services: bounds on their connections, their keys, and the page of metrics."""
