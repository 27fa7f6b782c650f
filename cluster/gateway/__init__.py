"""From a request to a stream of text: checks, admission, routing, failover, detokenisation."""
