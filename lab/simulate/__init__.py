"""A fleet in virtual time."""
