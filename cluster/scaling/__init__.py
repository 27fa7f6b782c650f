"""How large the pools should be: figures of replicas, the policy that Serve asks, and a record of what it said."""
