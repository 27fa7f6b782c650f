"""The step loop and its process: receive, schedule, execute, verify, commit, ask, publish."""
