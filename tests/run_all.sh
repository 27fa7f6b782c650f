#!/usr/bin/env bash
# Run all tests but soaks; arguments go to pytest. Whole services are started one after another with nothing beside them:
# a starved process breaks what has time-outs. Everything else follows in two workers. Last come the closing lines of both.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTEST=(.venv/bin/python -m pytest -rs)
logs=$(mktemp -d)
status=0
trap 'rm -rf "$logs"' EXIT

run() { # NAME of the log, then pytest's arguments; 5: they left it no tests
	"${PYTEST[@]}" "${@:2}" 2>&1 | tee "$logs/$1"
	local run_status=$?
	((run_status == 0 || run_status == 5)) || status=$run_status
}

# of the files that have services alone, where none is named: to collect all takes most of a minute (conftest.py sees to it)
files=()
[[ " $*" == *" tests/"* ]] || mapfile -t files < <(grep --recursive --files-with-matches --include="test_*.py" "mark\.service" tests)
run 1 -m "service and not soak" "${files[@]}" "$@"
# a worker has a core: more threads than cores wait for each other. By name, not by their number of tests: a file of few
# that takes minutes does not come last then, when the other worker has nothing left
OMP_NUM_THREADS=1 run 2 -m "not (service or soak)" --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
tail --quiet --lines 1 "$logs"/*
exit "$status"
