"""The public protocols: HTTP and gRPC servers, who may call, request ids."""
