"""A chat model's answers, split into content, reasoning and tool calls; no HTTP, no tokens."""
