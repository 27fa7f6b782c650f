"""Drafters that learn while they serve: what a pool keeps of its requests, its learner, and the versions it makes."""
