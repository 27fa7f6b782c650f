"""Drafters that run part of the target itself."""
