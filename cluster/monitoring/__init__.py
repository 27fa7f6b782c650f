"""Metrics and the state of the fleet, each defined once."""
