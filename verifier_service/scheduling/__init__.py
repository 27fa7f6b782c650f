"""Which requests run in a step, over which KV blocks: pure Python over integers."""
