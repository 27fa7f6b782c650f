"""What calls a running server from a terminal."""
