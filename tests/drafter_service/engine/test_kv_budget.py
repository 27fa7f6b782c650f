"""Which session loses its KV when another one needs room."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.drafter_service.engine.kv_budget import reserve
from outrider.verifier_service.scheduling.kv_cache import BlockPool


@dataclass(eq=False)
class Session:
    name: str
    block_table: list[int] = field(default_factory=list)


def test_idle_sessions_lose_their_kv_first_then_the_youngest_that_wait():
    pool = BlockPool(num_blocks=4, block_size=1)
    oldest, idle, older, youngest = (Session(name) for name in ("oldest", "idle", "older", "youngest"))
    for session in (idle, older, youngest):
        session.block_table = pool.allocate(1)
    lost: list[str] = []

    def take_kv(session: Session) -> None:
        lost.extend([session.name] if session.block_table else [])
        pool.release(session.block_table)
        session.block_table = []

    def has_room(num_tokens: int) -> bool:
        everyone, asked = [idle, older, youngest, oldest], [oldest, older, youngest]
        return reserve(pool, oldest, num_tokens, all_states=everyone, asked=asked, younger=asked[1:], take_kv=take_kv)

    assert has_room(1)
    assert lost == []
    assert has_room(2)
    assert lost == ["idle"]
    assert has_room(3)
    assert lost == ["idle", "youngest"]
    assert not has_room(5)
    assert lost == ["idle", "youngest", "older"]
