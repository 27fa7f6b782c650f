"""Processes forked from one that has imported what ranks import: each starts at once, where a spawned one takes long.

What is forked has imported torch and nothing else has happened in it: no thread, no device, no channel.
"""

from __future__ import annotations

import multiprocessing

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "outrider.cluster.offline.engine",
        "outrider.cluster.replicas.drafter_replica",
        "outrider.cluster.replicas.engine_shell",
        # what loading a model brings in, 1,500 modules; of the tests' own folder nothing is found here
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)
