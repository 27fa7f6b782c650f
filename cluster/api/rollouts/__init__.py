"""The endpoints for trainers."""
