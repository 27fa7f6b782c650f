"""`outrider generate-corpus`: what a target answers to prompts of many kinds, for its drafters to learn from."""
