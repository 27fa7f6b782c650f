"""What a chat model says, split into content, reasoning and tool calls; no HTTP, no tokens."""
