"""From a speculative configuration to a running drafter, in a pool or in the verifier's process."""
