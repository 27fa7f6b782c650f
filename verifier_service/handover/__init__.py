"""A request changes its verifier with its KV: see `messages.handover`."""
