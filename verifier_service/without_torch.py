"""Import transformers for its tokenizers and descriptions alone: with torch it takes 400 MB and seconds, without 70."""

from __future__ import annotations

import logging
import sys


def import_transformers() -> None:
    """Import transformers as where torch is not installed; it stays so in this process, in which no model is loaded.

    Where either is loaded already, or two threads meet here, what is there is used.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    advice = logging.getLogger("transformers")
    was_disabled, advice.disabled = advice.disabled, True  # that no model can be loaded
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say that there is none
    try:
        import transformers  # noqa: F401  # asks once whether there is torch
    finally:
        del sys.modules["torch"]
        advice.disabled = was_disabled
