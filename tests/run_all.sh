#!/usr/bin/env bash
# Run all tests but soaks; arguments go to pytest. Last come the closing lines of all runs.
#   1. Whole services are started one after another: a starved process breaks what has time-outs.
#   2. Tests that only compute run meanwhile on what services leave of the cores, at idle priority: nothing waits for them.
#   3. Everything else follows in two workers.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTEST=(.venv/bin/python -m pytest -rs)
# a worker has a core: more threads than cores wait for each other. By name, not by their number of tests: a file of few
# that takes minutes does not come last then, when the other worker has nothing left
TWO_WORKERS=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
COMPUTING=(
	tests/exactness tests/fuzz tests/drafter_service tests/benchmarks
	tests/verifier_service/model tests/verifier_service/pricing tests/verifier_service/sampling
	tests/cluster/bench tests/cluster/offline tests/cluster/simulate
)
logs=$(mktemp -d)
status=0
trap 'rm -rf "$logs"' EXIT

settle() { # STATUS of pytest; 5: the arguments left it no tests
	(($1 == 0 || $1 == 5)) || status=$1
}

run() { # NAME of the log, then pytest's arguments
	"${PYTEST[@]}" "${@:2}" 2>&1 | tee "$logs/$1"
	settle $?
}

services=() computing="" ignored=()
if [[ " $*" != *" tests/"* ]]; then # where nobody names files
	# of the files that have services alone: to collect all takes most of a minute (conftest.py sees to it)
	mapfile -t services < <(grep --recursive --files-with-matches --include="test_*.py" "mark\.service" tests)
	OMP_NUM_THREADS=1 chrt --idle 0 "${PYTEST[@]}" -m "not (service or soak)" --timeout 1800 "${TWO_WORKERS[@]}" \
		"${COMPUTING[@]}" "$@" >"$logs/2" 2>&1 &
	computing=$!
	ignored=("${COMPUTING[@]/#/--ignore=}")
fi
run 1 -m "service and not soak" "${services[@]}" "$@"
if [[ -n "$computing" ]]; then
	wait "$computing"
	settle $?
	cat "$logs/2"
fi
OMP_NUM_THREADS=1 run 3 -m "not (service or soak)" "${TWO_WORKERS[@]}" "${ignored[@]}" "$@"
tail --quiet --lines 1 "$logs"/*
exit "$status"
