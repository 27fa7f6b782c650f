#!/usr/bin/env bash
# Run all tests but soaks; arguments go to pytest. In the foreground whole services start one after another, and
# everything else follows in two workers. Beside both run, in the idle class, tests that only compute: they take what
# the others leave and wait for no clock, while a starved service breaks what has time-outs. Last come each run's time,
# the share of the processors that was in use meanwhile, and its closing line.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# each process that starts would compile our sources anew, and of pytest's workers each all tests
unset PYTHONDONTWRITEBYTECODE
PYTEST=(.venv/bin/python -m pytest -rs --durations=40)
# a worker has a core: more threads than cores wait for each other. By file, in conftest.py's order
WORKERS=(env OMP_NUM_THREADS=1 "${PYTEST[@]}" --numprocesses 2 --dist loadfile --no-loadscope-reorder)
IDLE=(nice -n 19)
command -v chrt >/dev/null && IDLE=(chrt --idle 0)
COMPUTING=(tests/exactness tests/drafter_service tests/lab tests/parity)
for room in cpu gpu messages model pricing sampling scheduling; do COMPUTING+=("tests/verifier_service/$room"); done
logs=$(mktemp -d)
computing=
trap '[[ -z $computing ]] || kill -- "-$computing" 2>/dev/null; rm -rf "$logs"' EXIT

busy() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; } # hundredths of a second, of all processors together

run() { # NAME of the log, then a command: what it prints goes there as well
	local begin=$SECONDS before status share
	before=$(busy)
	"${@:2}" 2>&1 | tee "$logs/$1.log"
	status=$?
	share=$((($(busy) - before) / ($(nproc) * (SECONDS - begin + 1))))
	echo "$1: $((SECONDS - begin)) s, $share % of the processors" >>"$logs/times"
	((status == 0 || status == 5)) || echo "$status" >>"$logs/failures" # 5: the arguments left it no tests
}

if [[ " $*" == *" tests/"* ]]; then # some files alone
	run services "${PYTEST[@]}" -m "service and not soak" "$@"
	run rest "${WORKERS[@]}" -m "not (service or soak)" "$@"
else
	# the files that have services alone: to collect all takes most of a minute (conftest.py sees that they are found);
	# sorted, so that those that share a service follow each other
	mapfile -t services < <(grep --recursive --files-with-matches --include="test_*.py" "mark\.service" tests | LC_ALL=C sort)
	# the kernels are compiled now, not by each of the first processes at once
	.venv/bin/python -c 'import torch; from outrider.verifier_service.cpu.kernels import load_kernels as load; load(torch.float32)'
	set -m # in a process group of its own, to end with this script
	run computing "${IDLE[@]}" "${WORKERS[@]}" -m "not (service or soak)" "${COMPUTING[@]}" "$@" >/dev/null &
	computing=$!
	set +m
	run services "${PYTEST[@]}" -m "service and not soak" "${services[@]}" "$@"
	run rest "${WORKERS[@]}" -m "not (service or soak)" "${COMPUTING[@]/#/--ignore=}" "$@"
	wait "$computing"
	computing=
	cat "$logs/computing.log"
fi
cat "$logs/times"
tail --quiet --lines 1 "$logs"/*.log
exit "$(tail --lines 1 "$logs/failures" 2>/dev/null || echo 0)"
