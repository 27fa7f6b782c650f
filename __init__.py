"""Serve large language models with speculative decoding whose drafting is a service of its own."""

from importlib.metadata import version as _version

__version__: str = _version("outrider")
