"""Distil drafters from any target on any text: draft models, heads and block drafters, in their public formats."""
