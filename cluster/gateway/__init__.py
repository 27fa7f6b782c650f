"""From a validated request to a stream of text, through the router and across failures."""
