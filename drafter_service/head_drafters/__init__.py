"""Drafters with heads over the target's hidden states."""
