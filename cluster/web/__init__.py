"""The web page: the live fleet and a playground."""
