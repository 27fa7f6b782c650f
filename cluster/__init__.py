"""Everything that spans processes and nodes: router, gateway, Ray Serve deployments, command line."""
