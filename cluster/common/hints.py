"""Hints for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click

from outrider.verifier_service.messages.lossy import refusal_of

MAX_NAME_CHARS = 64  # a longer name is no typo, and comparing it takes long
MISSPELT_RATIO = 0.8  # of common characters: temprature is meant to be temperature, reasoning_details is not a typo


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" with the closest known name, written with _ for -; without one, nothing.

    For what is not served on purpose, return ": " and the reason.
    """
    if (reason := refusal_of(name[:MAX_NAME_CHARS])) is not None:
        return f": {reason}"
    close = difflib.get_close_matches(name[:MAX_NAME_CHARS].replace("-", "_"), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def misspelt(name: str, known: Iterable[str]) -> str:
    """Return what `did_you_mean` does, but nothing unless the name is all but equal to a known one."""
    known = list(known)
    close = difflib.get_close_matches(name[:MAX_NAME_CHARS].replace("-", "_"), known, n=1, cutoff=MISSPELT_RATIO)
    return did_you_mean(name, close) if close or refusal_of(name[:MAX_NAME_CHARS]) is not None else ""


class ExplainingCommand(click.Command):
    """A command that says why an option which is not served on purpose is unknown."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            if (reason := refusal_of(error.option_name)) is None:
                raise
            raise click.UsageError(f"{error.option_name}: {reason}", context) from error
