"""`outrider make-head`: a head for a target, from its corpus to what it is served at, on one machine in minutes."""
