"""The laboratory: what measures, simulates and shows the service, and how the shipped models were made.

Nothing that serves imports it. `outrider.cluster.cli.main` knows its verbs by their names.
"""
