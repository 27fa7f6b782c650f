"""The web page: the fleet live, and a playground."""
