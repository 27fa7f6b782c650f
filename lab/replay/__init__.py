"""Drafters over recorded requests."""
