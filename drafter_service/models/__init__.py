"""Drafters with a model of their own."""
