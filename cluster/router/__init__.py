"""Where requests go, which drafter drafts for them, and how large the pools should be."""
