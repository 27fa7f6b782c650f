"""The draft model's side: sessions that may be lost at any moment, and the engine that drafts for them."""
