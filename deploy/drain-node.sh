#!/usr/bin/env bash
# Before a pod stops: have Serve start this node's replicas elsewhere, and wait until those here have ended their streams.
# usage: outrider-drain-node SECONDS    give up after so long; the pod's terminationGracePeriodSeconds must be longer
set -euo pipefail
limit_s=$1

ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod stops" \
    --deadline-remaining-seconds "$limit_s"
for ((waited_s = 0; waited_s < limit_s; waited_s++)); do
    pgrep -f '^ray::ServeReplica:' > /dev/null || exit 0
    sleep 1
done
echo "replicas are still here after $limit_s s" >&2
