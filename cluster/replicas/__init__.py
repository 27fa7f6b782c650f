"""The Ray Serve deployments, and how they start together on one machine."""
