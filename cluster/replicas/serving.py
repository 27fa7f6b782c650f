"""Start Ray and the service on this machine, and stop both."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import click
import ray
from ray import serve
from ray._private import worker
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.serve.config import HTTPOptions
from ray.serve.schema import DeploymentStatus, ServeStatus

from outrider.cluster.common.extras import is_installed
from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.machine import fit_drafting, num_busy_ranks, share_cores, usable_cores
from outrider.cluster.config.pools_config import PoolsConfig
from outrider.cluster.config.service_config import APP_NAME, VLLM, ServiceConfig
from outrider.cluster.replicas.app import build, build_drafters
from outrider.cluster.replicas.phase_listener import phases_heard
from outrider.cluster.replicas.stopping import (
    RoutedStreams,
    drain,
    ignore_signals,
    interrupt_at_signals,
    sigterm_blocked,
)
from outrider.drafter_service.service.drafter_spec import common_state_taps
from outrider.verifier_service.model.architectures import (
    load_model_description,
    require_supported,
    resolve_description,
    resolve_folder,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.without_torch import import_transformers

logger = logging.getLogger(__name__)

DRAFTERS_APP = "outrider-drafters"
OBJECT_STORE_BYTES = 200_000_000  # nothing large goes through Ray's object store
NUM_START_ATTEMPTS = 3
# not Ray's own folder, where other programs look for a cluster to join
RAY_FOLDER = Path(tempfile.gettempdir()) / f"outrider-ray-{os.getuid()}"
# their messages (Ray's token authentication is on, Serve has started) are no use to an operator
# Where a Ray of its own listens, unless at the public ports' address. None: at the machine's own.
_NODE_ADDRESSES = {"0.0.0.0": None, "::": None, "::1": "127.0.0.1"}
_CHATTY_LOGS = {
    "ray._private.authentication.authentication_token_setup": logging.ERROR,
    "ray.serve": logging.WARNING,
}
# of a Ray that is started here: nobody asks it for metrics and tasks, a third of what a service does at rest
QUIET_RAY = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
}
_FAILED = (DeploymentStatus.DEPLOY_FAILED, DeploymentStatus.UNHEALTHY)


class DeployError(RuntimeError):
    """The service did not start."""


OnPhase = Callable[[str], None]
_Config = TypeVar("_Config", bound=PoolsConfig)


@contextlib.contextmanager
def running_service(
    config: _Config,
    on_phase: OnPhase = lambda phase: None,
    *,
    build: Callable[[Any], serve.Application] = build,
    name: str = APP_NAME,
) -> Iterator[_Config]:
    """Run the service on the cluster of RAY_ADDRESS; without one, on a new Ray, fitted to this machine.

    `on_phase` gets each phase of the start, in words for the operator. `build` makes the application.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.tls is not None:
        config.tls.check()
    config.links.check()
    if isinstance(config, ServiceConfig):
        config = config.with_options(own_listener=True)  # Serve's proxy costs as much as a gateway
    is_shared = "RAY_ADDRESS" in os.environ
    if not is_shared:
        check_ports(config)
        if isinstance(config, DraftersConfig):
            config = config.with_options(own_proxy=True)
        config = fit_drafting(config, num_cores=usable_cores())
    on_phase(f"fetching {config.model.name}")
    fetch_models(config)
    with ThreadPoolExecutor(max_workers=1) as beside, contextlib.ExitStack() as undo:
        starting = undo.enter_context(contextlib.ExitStack())
        # both at once: Ray's processes start as slowly as the libraries that read a model load
        on_phase(f"reading {config.model.name}, {'joining the Ray cluster' if is_shared else 'starting Ray'}")
        checked = beside.submit(check_models, config)
        if is_shared:
            ray.init(log_to_driver=False)
        else:
            starting.enter_context(phases_heard(on_phase))  # before Ray, whose processes inherit the socket's name
            config = _start_own_ray(config)
        undo.callback(_quietly, stop_ray)
        checked.result()
        undo.callback(_quietly, lambda: stop_serve(is_shared=is_shared, name=name))
        on_phase("starting Ray Serve")
        proxy_location = "Disabled" if config.listens_itself else "HeadOnly"
        serve.start(proxy_location=proxy_location, http_options=HTTPOptions(host=config.host, port=config.port))
        on_phase(_replicas_of(config))
        deploy(build(config), name)
        starting.close()
        yield config


def _start_own_ray(config: _Config) -> _Config:
    """Start a Ray for this service; return the configuration with this machine's cores divided among its processes."""
    for name, level in _CHATTY_LOGS.items():
        logging.getLogger(name).setLevel(level)
    config = share_cores(config, num_ranks=num_busy_ranks(config), num_cores=usable_cores())
    with sigterm_blocked():
        start_ray(**own_ray_options(config))
    _end_onlookers()
    return config


def _end_onlookers() -> None:
    """End the processes of a Ray on one machine that serve people who look at it: there are none.

    They read logs for this process, which does not want them, would add machines, and count uses.
    """
    node: Any = worker._global_node
    for kill in (node.kill_log_monitor, node.kill_monitor, node.kill_dashboard):
        kill(check_alive=False)


def own_ray_options(config: PoolsConfig) -> dict[str, Any]:
    """Return the options of a separate Ray, which joins no other and which no program joins by chance."""
    return {
        "address": "local",  # never a cluster that is running here
        # Ray counts CPUs to place ranks; on a small machine ranks share cores
        "num_cpus": max(os.cpu_count() or 1, config.num_ranks + config.num_shells + 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": str(RAY_FOLDER),
        "_node_ip_address": _NODE_ADDRESSES.get(config.host, config.host),
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }


def _replicas_of(config: PoolsConfig) -> str:
    """Return a line about the replicas of a service."""
    counts = []
    if isinstance(config, ServiceConfig):
        num_verifiers = config.num_verifiers.fewest + config.verifiers.num_prefill_verifiers.fewest
        counts = [("gateway", config.gateway.num_gateways.fewest), ("verifier", num_verifiers)]
    counts.append(("drafter", sum(pool.num_drafters.fewest for pool in config.pools.values())))
    named = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts if count]
    return f"starting {', '.join(named)}"


def start_ray(
    *,
    is_up: Callable[[], bool] = ray.is_initialized,
    init: Callable[..., object] = ray.init,
    stop: Callable[[], None] = ray.shutdown,
    **options: Any,
) -> None:
    """Start a separate Ray; try again, since on a busy machine its processes may miss Ray's fixed time-out.

    Raises Ray's error of the last attempt, and `DeployError` if this process is connected to a Ray already.
    """
    if is_up():
        raise DeployError("this process is connected to a Ray already: end that first, with ray.shutdown()")
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    for attempt in range(1, NUM_START_ATTEMPTS + 1):
        try:
            init(**options)
            return
        except Exception as error:  # Ray raises a bare Exception here
            logger.warning("Ray did not start (attempt %d of %d): %s", attempt, NUM_START_ATTEMPTS, error)
            stop()
            if attempt == NUM_START_ATTEMPTS:
                raise


def deploy(
    application: serve.Application,
    name: str = APP_NAME,
    *,
    run: Callable[..., object] = serve.run,
    status: Callable[[], ServeStatus] = serve.status,
) -> None:
    """Deploy the service and wait until it runs; raises `DeployError` with each failed deployment's message."""
    try:
        run(application, name=name, route_prefix="/")
    except RuntimeError as error:  # it names the deployments, but not their errors
        deployments = status().applications[name].deployments
        reasons = [f"{name}: {info.message}" for name, info in deployments.items() if info.status in _FAILED]
        raise DeployError("\n".join([str(error), *reasons])) from error


def stop_serve(
    *,
    is_shared: bool,
    name: str = APP_NAME,
    is_up: Callable[[], bool] = ray.is_initialized,
    delete: Callable[[str], None] = serve.delete,
    shutdown: Callable[[], None] = serve.shutdown,
) -> None:
    """Stop the service. If Ray is gone, so is the service, and Serve would start a Ray to look for it."""
    if not is_up():
        return
    if is_shared:
        delete(name)  # there may be other applications
    else:
        shutdown()


def stop_ray() -> None:
    """Disconnect from Ray; kill the processes of a Ray that was started here.

    Ray itself would wait a second for each of its processes in turn, since SIGTERM is blocked in them. They hold
    nothing that could be lost. Its raylet's agents would try for a minute to report that the raylet is dead.
    """
    node: Any = worker._global_node
    children: list[int] = []
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
        raylets = node.all_processes.get(PROCESS_TYPE_RAYLET, ())  # none if this process has joined a cluster
        children = [child for raylet in raylets for child in child_processes(raylet.process.pid)]
    ray.shutdown()
    for child in children:
        with contextlib.suppress(ProcessLookupError):  # most have ended with the raylet
            os.kill(child, signal.SIGKILL)


def child_processes(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`; none where the system has no /proc (Linux has)."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()] if listing.exists() else []


def _quietly(stop: Callable[[], None], whisper: str = "infinite retries remaining") -> None:
    """Stop something without Ray's messages on stdout, at any log level, about calls to a Serve that is gone."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        stop()
    for line in said.getvalue().splitlines():
        if whisper not in line:
            click.echo(line)


def check_ports(config: PoolsConfig) -> None:
    """Check that no program listens on a public port; raises `OSError` naming the option.

    Gateways open it as a shared port, and would share it with another program too.
    """
    for name in ("port", "grpc_port"):
        port = getattr(config, name)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections in TIME_WAIT do not count
            try:
                probe.bind((config.host, port))
            except OSError as error:
                raise OSError(f"{name}: cannot listen on {config.address(port)}: {error.strerror}") from error


def draft_models_of(config: PoolsConfig) -> set[ModelConfig]:
    """Return the checkpoints of all drafters."""
    return {drafter.model for drafter in config.drafter_specs if drafter.model is not None}


def fetch_models(config: PoolsConfig) -> None:
    """Download or convert missing models; raises `ValueError` or `OSError` if one is not found."""
    target = config.model.checkpoint(config.model.target_path, 1)
    is_target_read = isinstance(config, ServiceConfig) or any(one.reads_target for one in config.drafter_specs)
    if is_target_read:
        resolve_folder(target)
    else:
        resolve_description(target)  # not its weights: they may fill the disk of a machine that only looks drafts up
    for model in draft_models_of(config):
        resolve_folder(model)


def check_models(config: PoolsConfig) -> None:
    """Check, before any replica starts, that the models can be served; raises `UnsupportedModelError` or `OSError`.

    The target of another engine is left to that engine.
    """
    models = draft_models_of(config)
    if isinstance(config, ServiceConfig):
        if config.verifiers.engine != VLLM:
            models.add(config.verifier_spec.model)
        elif not is_installed("vllm"):
            raise ValueError("engine: vLLM is not installed in this environment: docs/vllm.md says how")
    for model in models:
        description = load_model_description(resolve_folder(model), model)
        require_supported(description, model.tensor_parallel_size)


def _load_little(config: PoolsConfig) -> None:
    """Keep torch out of this process, which only starts the others, where the models' descriptions allow it."""
    target = config.model.checkpoint(config.model.target_path, 1)
    if not any(model.has_code for model in (target, *draft_models_of(config))):
        import_transformers()


def tell_phases(say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> OnPhase:
    """Return a listener that prints each phase of a start, with the seconds until it began."""
    begin_s = clock()
    return lambda phase: say(f"{clock() - begin_s:5.1f} s  {phase}")


def serve_until_interrupted(config: ServiceConfig) -> None:
    """Serve until SIGINT or SIGTERM, then until the streams have ended; leave no process behind.

    Phases are printed to stderr. A second signal aborts the streams.
    """

    def tell(line: str) -> None:
        click.echo(line, err=True)

    on_phase = tell_phases(tell)
    _load_little(config)
    with running_service(config, on_phase) as config:
        on_phase("ready")
        interrupt_at_signals()  # not earlier: Ray sets its own handler when it starts
        scheme = "http" if config.tls is None else "https"
        address = f"{scheme}://{config.address(config.port)} and grpc {config.address(config.grpc_port)}"
        with contextlib.suppress(KeyboardInterrupt):
            click.echo(f"serving {config.model.name} on {address}; drafts: {config.who_drafts}")
            for note in notes_of(config):
                tell(note)
            while True:
                time.sleep(1.0)  # `signal.pause` would miss a signal that arrives just before it
        click.echo("stopping")
        with contextlib.suppress(KeyboardInterrupt):  # also before draining has begun
            interrupt_at_signals()
            drain(RoutedStreams(), config.drain_timeout_s, tell)
        ignore_signals()
    gc.freeze()  # the process ends: a last garbage collection over all that is loaded takes most of a second


def notes_of(config: ServiceConfig) -> Iterator[str]:
    """Yield what the operator of a service that has started should know of its options."""
    if not config.gateway.api_key_hashes:
        yield "no API key is asked for: all clients share one prefix cache and one store of past responses"
    if config.who_drafts == "nobody" and config.max_draft_length > 0 and config.speculation != "off":
        yield "nothing drafts, so speculation is off: --draft-model, or -sc with a method, would change that"


def serve_drafters_until_interrupted(config: DraftersConfig) -> None:
    """Serve a pool without verifiers until SIGINT or SIGTERM. Engines that draft from it then go on without drafts."""
    on_phase = tell_phases(lambda line: click.echo(line, err=True))
    _load_little(config)
    with running_service(config, on_phase, build=build_drafters, name=DRAFTERS_APP):
        on_phase("ready")
        interrupt_at_signals()
        directory, http = config.address(config.grpc_port), f"http://{config.address(config.port)}"
        with contextlib.suppress(KeyboardInterrupt):
            click.echo(
                f"drafting for {config.model.name} at {directory}, metrics at {http}/metrics: {config.who_drafts}"
            )
            if taps := common_state_taps(config.drafter_specs):
                click.echo(f'heads read hidden states, which vLLM sends if its options say "state_taps": {list(taps)}')
            while True:
                time.sleep(1.0)
        click.echo("stopping")
        ignore_signals()
