"""What every verb shares: errors of usage, and how wide plain output is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

PLAIN_WIDTH = 140  # columns of text where the output is no terminal


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Show a bad value as a usage error, not as a traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has closed it: click ends quietly
        raise
    except (ValueError, OSError) as error:  # OSError: no such model, here or at the hub
        raise click.UsageError(str(error)) from error
