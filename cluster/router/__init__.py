"""Where requests go, and which drafter drafts for them."""
