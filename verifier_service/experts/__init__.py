"""A mixture's experts: which of them tokens take, and where their weights are."""
