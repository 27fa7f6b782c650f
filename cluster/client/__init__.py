"""Clients of a running server, in a terminal."""
