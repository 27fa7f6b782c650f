"""The other end of tensor channels, in a process of its own that tests may freeze and kill.

Lines in: `receive GROUP`, `send GROUP STORE`, `expect GROUP NUMBER NUM_BYTES`, `offer GROUP NUM_BYTES`. Lines out: the
address of its store, then `GROUP connected`, `GROUP NUMBER SUM` for what has arrived, `GROUP failed`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0


class Peer:
    """A child process at the other end."""

    def __init__(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from fakes import tensor_peer; tensor_peer.main()"
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for(lambda: self.heard)
        self.store = self.heard[0]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard.append(line.strip())

    def say(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self, line: str) -> None:
        self.wait_for(lambda: line in self.heard)

    def wait_for(self, condition: object) -> None:
        assert callable(condition)
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"what was waited for does not come; heard {self.heard}"
            assert self._process.poll() is None, f"the peer has ended: {self._process.returncode}"
            time.sleep(0.002)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def main() -> None:
    import torch

    from outrider.verifier_service.links.tensor_channel import ChannelLimits, TensorReceiver, TensorSender, TensorStore
    from outrider.verifier_service.messages.tensor_route import TensorRoute

    def say(*words: object) -> None:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()

    def tell(group: str) -> None:
        receiver = receivers.get(group)
        if receiver is not None:
            for number, tensor in receiver.arrived():
                say(group, number, int(tensor.sum()))
            if receiver.failure is not None:
                say(group, "failed")

    limits = ChannelLimits(connect_timeout_s=30.0, transfer_timeout_s=30.0, max_queued_bytes=1 << 30)
    store = TensorStore("127.0.0.1")
    receivers: dict[str, TensorReceiver] = {}
    senders: dict[str, TensorSender] = {}
    say(store.address)
    for line in sys.stdin:
        verb, group, *rest = line.split()
        route = TensorRoute(transport="gloo", store=rest[0] if verb == "send" else store.address, group=group)
        match verb:
            case "receive":
                receivers[group] = TensorReceiver(route, store, lambda group=group: tell(group), limits)
            case "expect":
                receivers[group].expect(int(rest[0]), int(rest[1]))
            case "send":
                senders[group] = TensorSender(route, limits)
                while not senders[group].is_connected:
                    time.sleep(0.001)
                say(group, "connected")
            case "offer":
                say(group, "offered", senders[group].offer(torch.ones(int(rest[0]), dtype=torch.uint8)))
