"""Drafters without a model: n-grams, suffix trees, lookahead."""
