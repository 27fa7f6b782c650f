"""Who drafts, on which drafter, how much, and how large the pools should be."""
