"""`outrider demo`: a service is started, asked, flooded, hurt and stopped, and says what it measured."""
