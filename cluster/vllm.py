"""What vLLM's `--speculative-config` names to draft from a pool: `outrider.cluster.vllm.Drafts`; see docs/vllm.md."""

from outrider.cluster.hosted.vllm_drafts import Drafts

__all__ = ["Drafts"]
