"""vLLM as the engine of a verifier, with our own engine's messages."""
