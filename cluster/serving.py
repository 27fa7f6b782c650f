"""Start Ray and the service on this machine, and stop both."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

import click
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from outrider.cluster.app import build
from outrider.cluster.config import APP_NAME, ServiceConfig
from outrider.verifier_service.architectures import load_model_description, require_supported, resolve_folder

OBJECT_STORE_BYTES = 200_000_000  # nothing large goes through Ray's object store


@contextlib.contextmanager
def running_service(config: ServiceConfig) -> Iterator[None]:
    """Run the service: on the cluster that RAY_ADDRESS names, else on a Ray of its own on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    check_models(config)
    is_shared = "RAY_ADDRESS" in os.environ
    if is_shared:
        ray.init(log_to_driver=False)
    else:
        ray.init(
            # Ray counts CPUs to place ranks; on a small machine ranks share cores
            num_cpus=max(os.cpu_count() or 1, config.num_ranks + config.num_verifiers + config.num_drafters + 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=config.host if config.host != "0.0.0.0" else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=config.host, port=config.port))
        serve.run(build(config), name=APP_NAME, route_prefix="/")
        yield
    finally:
        if is_shared:
            serve.delete(APP_NAME)  # others may have applications there
        else:
            serve.shutdown()
        ray.shutdown()


def check_models(config: ServiceConfig) -> None:
    """Refuse a model that cannot be served before anything is started; raises `UnsupportedModelError` or `OSError`."""
    specs = [config.verifier_spec.model, *([config.drafter_spec.model] if config.drafter_spec else [])]
    for model in specs:
        description = load_model_description(resolve_folder(model), model)
        require_supported(description, model.tensor_parallel_size)


def serve_until_interrupted(config: ServiceConfig) -> None:
    """Serve until SIGINT or SIGTERM; leave no process behind."""
    stopping = threading.Event()
    with running_service(config):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopping.set())
        address = f"http://{config.host}:{config.port} and grpc {config.host}:{config.grpc_port}"
        click.echo(f"serving {config.model_name} on {address}")
        stopping.wait()
        click.echo("stopping")
