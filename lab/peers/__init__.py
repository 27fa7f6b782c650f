"""`outrider bench peers`: other engines beside ours, each in a process and an environment of its own.

The scripts named `*_worker.py` run with their peer's interpreter, where this package is not installed: they import
nothing of it but `worker.py`, which lies beside them.
"""
