"""The public protocols: HTTP and gRPC servers, API keys, request ids."""
