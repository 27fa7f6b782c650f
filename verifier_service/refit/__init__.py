"""New weights for a model that serves: where they come from, whether they fit, and their copy into the old ones."""
