"""The target model on its ranks: configuration, weights, attention over the block pool, execution."""
