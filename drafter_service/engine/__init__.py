"""Sessions of all verifiers, one batch of asks at a time, and what every drafter shares."""
