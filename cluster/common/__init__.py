"""Shared by all rooms: errors, logs, keys, TLS, the terminal."""
