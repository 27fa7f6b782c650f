"""What every room may use: errors, logs, keys, TLS, the terminal."""
