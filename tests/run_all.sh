#!/usr/bin/env bash
# Run all tests but soaks; arguments go to pytest. Whole services are started one after another; beside them run, when
# the machine is idle, the long tests that know no time-outs. Everything else follows in two workers. Last come the closing
# lines of all three.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTEST=(.venv/bin/python -m pytest -rs)
IDLE=(nice -n 19) # Ray's workers are nice as well: better is to run when nobody else would
if chrt --idle 0 true 2>/dev/null; then IDLE=(chrt --idle 0); fi
logs=$(mktemp -d)
status=0
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$logs"' EXIT

note() { # STATUS of a run; 5: its arguments left it no tests
	(($1 == 0 || $1 == 5)) || status=$1
}

"${IDLE[@]}" "${PYTEST[@]}" -m "patient and not soak" "$@" &>"$logs/1" &
"${PYTEST[@]}" -m "service and not soak" "$@" 2>&1 | tee "$logs/2"
note $?
wait %1
note $?
cat "$logs/1"
"${PYTEST[@]}" -m "not (service or patient or soak)" --numprocesses 2 --dist loadfile "$@" 2>&1 | tee "$logs/3"
note $?
tail --quiet --lines 1 "$logs"/*
exit "$status"
