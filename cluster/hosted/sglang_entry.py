"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`): registers our algorithm.

    OUTRIDER_SGLANG='{"pool": "host:port"}' python -m sglang.launch_server … --speculative-algorithm OUTRIDER

Registering costs nothing where another algorithm is chosen: our worker is made when SGLang asks for it. SGLang is
imported within `register` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from outrider.cluster.hosted.sglang_worker import check_server_args, options_of, pool_worker

ALGORITHM = "OUTRIDER"


def register() -> None:
    """Register the algorithm in this process."""
    from sglang.srt.arg_groups.speculative_hook import _handle_ngram
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    register_with(SpeculativeAlgorithm, CustomSpecAlgo, handle_ngram=_handle_ngram, make_worker=_make_worker)


def register_with(
    algorithms: Any, custom: type, *, handle_ngram: Callable[[Any], None], make_worker: Callable[[Any], type]
) -> None:
    """Register the algorithm in SGLang's enumeration, as one that is verified as NGRAM's drafts are.

    `handle_ngram` sets SGLang's arguments for NGRAM, which are ours: width, number of requests, devices.
    """

    class PoolAlgorithm(custom):
        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            handle_ngram(server_args)
            check_server_args(server_args)

    register = algorithms.register(
        ALGORITHM, supports_overlap=False, validate_server_args=check_server_args, spec_class=PoolAlgorithm
    )
    register(make_worker)


def _make_worker(server_args: Any) -> type:
    """Return our worker's class; raises `ValueError` where the pool is not said, before anything is loaded."""
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    return pool_worker(NGRAMWorker, options_of(os.environ), group_of=get_tp_group)
