"""What a service is told: options, files, JSON, and what follows from them."""
