"""A libFuzzer target for the frame decoder, guided by its coverage: `guided_frames.py CORPUS [libFuzzer options]`.

A script of its own, for the decoder must be instrumented as it is imported; guided.py runs it.
"""

from __future__ import annotations

import sys

import atheris

MESSAGES = "outrider.verifier_service.messages"
with atheris.instrument_imports(include=[f"{MESSAGES}.wire", f"{MESSAGES}.link"]):
    from fuzz.tally import GUIDED
    from fuzz.test_wire_frames import decodes_or_is_refused

if __name__ == "__main__":
    atheris.Setup(sys.argv, lambda payload: decodes_or_is_refused(payload, GUIDED))
    atheris.Fuzz()
