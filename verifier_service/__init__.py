"""The target model's side: paged KV, scheduling, model execution, verification. Knows nothing of Ray or HTTP."""
