"""From a speculative configuration to a drafter that serves: in a pool, or in the verifier's process."""
