"""Messages between threads, processes and hosts, and the value types that they are made of."""
