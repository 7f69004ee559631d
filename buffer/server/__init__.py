"""One stateless gRPC front: its process, its handlers, its standing streams."""
