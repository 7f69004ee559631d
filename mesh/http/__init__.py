"""What services answer over HTTP: bounds and keys of servers, and the page of metrics."""
