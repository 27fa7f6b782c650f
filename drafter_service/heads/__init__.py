"""Heads that draft from the target's hidden states: modules, loaders of public formats."""
