"""Options that are right by themselves and wrong together. Every check raises `ValueError` naming the field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.drafter_service.service.speculative_config import Location
from outrider.verifier_service.messages.request import AcceptanceRule
from outrider.verifier_service.messages.tensor_route import GLOO, NCCL

if TYPE_CHECKING:
    from outrider.cluster.config.service_config import ServiceConfig

OUTRIDER, VLLM = "outrider", "vllm"  # engines
_PASSED_ON = ("model", "tensor_parallel_size", "distributed_executor_backend")  # to vLLM, never to be said otherwise


def check_links(config: ServiceConfig) -> None:
    """Refuse tensor channels that the device has not or TLS does not cover, and a name without TLS."""
    transport = config.speculative.tensor_transport
    if transport == NCCL and config.device == "cpu":
        raise ValueError("speculative_config: tensor_transport: nccl needs the device cuda")
    if config.link_tls is not None and transport in (GLOO, NCCL):
        raise ValueError(
            f"speculative_config: tensor_transport: {transport} is not encrypted, "
            "the links between services are: use grpc"
        )
    if config.link_tls is None and config.link_ssl_server_name is not None:
        raise ValueError("link_ssl_server_name needs link_ssl_certfile, link_ssl_keyfile and link_ssl_ca_certs")


def check_engine(config: ServiceConfig) -> None:
    """Refuse what the chosen engine cannot do."""
    if config.engine not in (OUTRIDER, VLLM):
        raise ValueError("engine must be outrider or vllm")
    if config.engine == OUTRIDER:
        for name in ("engine_kwargs", "lora_modules"):
            if getattr(config, name):
                raise ValueError(f"{name} are vLLM's: they need engine vllm")
        return
    if config.quantization is not None:
        raise ValueError("quantization: int8 is our own engine's; vLLM's go into engine_kwargs, by vLLM's names")
    if config.check_integrity:
        raise ValueError("check_integrity: vLLM keeps books of its own")
    if config.model_name in config.lora_modules:
        raise ValueError(f"lora_modules: {config.model_name} is the model's own name")
    for name in _PASSED_ON:
        if name in config.engine_kwargs:
            raise ValueError(f"engine_kwargs: {name} is not vLLM's to be told: say it to the service")
    speculative = config.speculative
    if speculative.rejection_sample_method is not AcceptanceRule.STANDARD:
        raise ValueError("speculative_config: rejection_sample_method: vLLM verifies by the standard rule alone")
    if speculative.num_tree_nodes:
        raise ValueError("speculative_config: num_tree_nodes: vLLM verifies chains alone")
    if config.is_drafter_named and speculative.location is Location.VERIFIER:
        raise ValueError("speculative_config: location: vLLM's drafts come from a pool, not from its own process")
