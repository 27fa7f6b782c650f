"""The verifier's side of drafting: sessions, rounds, deadlines; without model code and without Ray."""
