"""What crosses between threads, processes and hosts, and the value types that messages are made of."""
