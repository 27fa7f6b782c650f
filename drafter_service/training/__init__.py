"""Distil drafters from any target on any text: draft models, Medusa heads, EAGLE-3 heads, in their public formats."""
