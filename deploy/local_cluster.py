"""Run a Ray cluster of three nodes on this machine: one labelled for verifiers, two for drafters.

    python deploy/local_cluster.py &                 # prints its addresses
    serve deploy deploy/serve.yaml                   # places drafters apart from verifiers
    python deploy/local_cluster.py --stop            # or Ctrl-C

The nodes are processes with this machine's address (Ray translates 127.0.0.1 to it on its own). Ray counts CPUs only to
place replicas, so the nodes offer more than there are.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import click
from ray.cluster_utils import Cluster

NUM_DRAFTER_NODES = 2
NUM_CPUS = 16  # of each node, as Ray counts them
NUM_REPLICAS = 4  # of its pool that a node has room for
OBJECT_STORE_BYTES = 80_000_000  # nothing large goes through Ray's object store
PID_FILE = Path(tempfile.gettempdir()) / f"outrider-local-cluster-{os.getuid()}.pid"
STOP_TIMEOUT_S = 60.0


def start(cluster: Cluster, dashboard_port: int) -> None:
    """Start the nodes and print what they are; they end with this process."""
    dashboard = {"include_dashboard": True, "dashboard_port": dashboard_port}
    for pool, options in (("verifier", dashboard), *[("drafter", {})] * NUM_DRAFTER_NODES):
        node = cluster.add_node(
            num_cpus=NUM_CPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            labels={"pool": pool},
            resources={pool: NUM_REPLICAS},  # for those who place by resources instead of labels
            **options,
        )
        click.echo(f"node {node.node_id} pool={pool}")


def running_pid() -> int | None:
    """Return the process that runs the cluster, None when there is none."""
    try:
        pid = int(PID_FILE.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pid if Path(__file__).name.encode() in command else None


def stop() -> None:
    """End the running cluster and wait for it; raises `click.ClickException` when there is none or it does not end."""
    pid = running_pid()
    if pid is None:
        raise click.ClickException("no local cluster is running")
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while running_pid() == pid:
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"process {pid} did not end within {STOP_TIMEOUT_S:g} s")
        time.sleep(0.1)


def run(dashboard_port: int) -> None:
    """Run the cluster until SIGINT or SIGTERM."""
    if (pid := running_pid()) is not None:
        raise click.ClickException(f"a local cluster is running already, as process {pid}; --stop ends it")
    PID_FILE.write_text(str(os.getpid()))
    cluster = Cluster()
    try:
        start(cluster, dashboard_port)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # not before: every node sets a handler of its own
        click.echo(f"RAY_ADDRESS={cluster.address}")
        click.echo(f"RAY_DASHBOARD_ADDRESS=http://127.0.0.1:{dashboard_port}")
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        click.echo("stopping")
    finally:
        cluster.shutdown()
        PID_FILE.unlink()


@click.command(help=__doc__)
@click.option("--dashboard-port", type=int, default=8265, show_default=True, help="Where `serve deploy` finds it.")
@click.option("--stop", "is_stop", is_flag=True, help="Stop the cluster that runs.")
def main(dashboard_port: int, is_stop: bool) -> None:
    if is_stop:
        stop()
    else:
        run(dashboard_port)


if __name__ == "__main__":
    main()
