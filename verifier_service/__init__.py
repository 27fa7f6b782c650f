"""The target model's side: paged KV, scheduling, model execution, verification. No Ray, no HTTP."""
