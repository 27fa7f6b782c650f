"""Serve large language models with speculative decoding whose drafting is a service of its own."""

from importlib.metadata import version

__version__: str = version("outrider")
