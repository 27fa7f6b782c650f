"""The gateways of one service, and what they ask each other."""
