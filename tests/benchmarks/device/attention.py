"""How much of a GPU's memory bandwidth attention uses: `python tests/benchmarks/device/attention.py`, on a CUDA device.

Every row is one layer's attention of a step, timed for the Triton kernel and for the gathered reference. The bytes are
those of the keys and values that must be read once; the bandwidth is that of a copy on the same device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionHandler,
    AttentionOptions,
    KVPool,
    LayerShape,
)
from outrider.verifier_service.model.triton_attention import TritonContext

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 32, 8, 128
STEPS = ((1, 1, 32_768), (64, 1, 4_096), (64, 5, 4_096), (8, 64, 8_192), (1, 2_048, 8_192))  # sequences, query, context
NUM_RUNS = 20
COPY_BYTES = 1 << 30


def milliseconds(action: Callable[[], object]) -> float:
    """Time an action on the device, warm."""
    action()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_RUNS):
        action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / NUM_RUNS


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2e3 * COPY_BYTES / milliseconds(lambda: target.copy_(source))


def make_batch(num_sequences: int, query_length: int, context_length: int) -> ScheduledBatch:
    width = context_length // BLOCK_SIZE
    blocks = torch.randperm(num_sequences * width, generator=torch.Generator().manual_seed(0)).view(-1, width).tolist()
    places = [divmod(place, BLOCK_SIZE) for place in range(context_length - query_length, context_length)]
    num_tokens = num_sequences * query_length
    return ScheduledBatch(
        token_ids=[0] * num_tokens,
        positions=[0] * num_tokens,
        slot_mapping=[table[block] * BLOCK_SIZE + offset for table in blocks for block, offset in places],
        query_lengths=[query_length] * num_sequences,
        context_lengths=[context_length] * num_sequences,
        block_tables=blocks,
        logits_indices=[],
    )


def measure(num_sequences: int, query_length: int, context_length: int, bandwidth: float) -> str:
    """One row of the table: times, and the share of the copy's bandwidth."""
    device = torch.device("cuda")
    shape = LayerShape(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, value_dim=HEAD_DIM)
    batch = make_batch(num_sequences, query_length, context_length)
    num_blocks = num_sequences * context_length // BLOCK_SIZE
    pool = KVPool({0: shape}, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.bfloat16, device=device)
    query, key, value = (
        torch.randn(batch.num_tokens, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )

    def timed(handler: AttentionHandler) -> float:
        return milliseconds(lambda: handler.attend(0, query, key, value, AttentionOptions()))

    paged_ms, gathered_ms = timed(TritonContext.of(batch, pool)), timed(AttentionContext.of(batch, pool))
    num_bytes = 2 * num_sequences * context_length * shape.num_elements
    share = num_bytes / (paged_ms / 1e3) / bandwidth
    sizes = f"{num_sequences:>9} {query_length:>6} {context_length:>8}"
    return f"{sizes} {paged_ms:>10.3f} {gathered_ms:>12.3f} {share:>11.0%}\n"


def main() -> None:
    """Write the table."""
    bandwidth = copy_bandwidth()
    sys.stdout.write(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e12:.2f} TB/s, reads and writes added\n")
    sys.stdout.write("sequences  query  context  triton_ms  gathered_ms  bandwidth\n")
    for sizes in STEPS:
        sys.stdout.write(measure(*sizes, bandwidth))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA device, torch sees none")
    main()
