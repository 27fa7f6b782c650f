#!/usr/bin/env bash
# The short loop: style, types, and every test that starts no service and is not in tests/slow.txt. Types are checked
# beside the tests: each leaves the other some time of a core.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

unset PYTHONDONTWRITEBYTECODE # as in run_all.sh
log=$(mktemp)
trap 'rm -f "$log"' EXIT

make --no-print-directory lint >"$log" 2>&1 &
lint=$!
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m "not (service or soak or slow)" --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
tests_status=$?
wait "$lint"
lint_status=$?
cat "$log"
exit $((tests_status || lint_status))
