"""vLLM as the engine of a verifier: told and answering what our own engine is told and answers."""
