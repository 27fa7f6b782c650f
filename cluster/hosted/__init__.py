"""Our verifying side inside another engine: drafts from a pool, priced step by step; no Ray, none of our engine."""
