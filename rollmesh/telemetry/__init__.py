"""The metrics of all services together: their reference, and the dashboard of Grafana that is made of them."""
