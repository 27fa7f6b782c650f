"""The endpoints that trainers already speak: SGLang's native ones, vLLM's, prime-rl's."""
