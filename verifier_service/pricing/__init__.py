"""How much to draft: step times, survival, and the price of a draft token."""
