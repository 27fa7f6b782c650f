"""The benchmarks that users run."""
