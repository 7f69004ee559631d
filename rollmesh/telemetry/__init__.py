"""The metrics of all services together: their reference, and the dashboard that is made of them."""
