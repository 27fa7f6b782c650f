"""Outrider through gRPC: `outrider.v1.Inference`, as proto/generation.proto defines it.

With `outrider serve` in another terminal: `python examples/grpc_client.py [ADDRESS]`.
"""

from __future__ import annotations

import sys

import grpc

from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc

ADDRESS = "127.0.0.1:50051"
PROMPT = "def read_lines(path):\n"


def main(address: str = ADDRESS) -> None:
    with grpc.insecure_channel(address) as channel:  # with TLS: grpc.secure_channel
        stub = generation_pb2_grpc.InferenceStub(channel)
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
        print(f"{address} serves {info.model_name}: {info.vocab_size} tokens, at most {info.max_model_len} in a row")
        generate(stub)
        cancel(stub)


def generate(stub: generation_pb2_grpc.InferenceStub) -> None:
    """Stream with drafts of at most two tokens; say where tokens came from."""
    sampling = pb.SamplingParams(max_tokens=48, temperature=0.8, seed=1, num_speculative_tokens=2)
    num_accepted = 0
    last = pb.GenerateChunk()
    print(f"\n{PROMPT}", end="")
    for chunk in stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling)):
        print(chunk.text, end="", flush=True)
        num_accepted += list(chunk.token_origins).count(pb.TOKEN_ORIGIN_ACCEPTED)
        last = chunk  # the last one has usage and speculation
    print(f"\n[{num_accepted} of {last.usage.completion_tokens} tokens came from drafts]")
    if not last.speculative_decoding.num_drafts:
        print(f"[no drafts: {last.speculative_decoding.disabled_reason or 'none came in time'}]")


def cancel(stub: generation_pb2_grpc.InferenceStub) -> None:
    """Stop a stream after its first chunk: the verifier and its drafter forget the request at once."""
    call = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=1000, ignore_eos=True)))
    next(call)
    call.cancel()
    try:
        for _ in call:
            pass  # what was under way
    except grpc.RpcError as error:
        print(f"\ncancelled a second stream: {error.code().name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
