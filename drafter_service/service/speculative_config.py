"""The keys of `--speculative-config`: vLLM's, and our own."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outrider.verifier_service.messages.draft import require
from outrider.verifier_service.messages.request import AcceptanceRule
from outrider.verifier_service.messages.tensor_route import TRANSPORTS
from outrider.verifier_service.model.config import DTYPES

MAX_DRAFT_LENGTH = 64
MAX_TREE_NODES = 256
MAX_AHEAD_BRANCHES = 64
USUAL_AHEAD_BRANCHES = 8


class Method(enum.StrEnum):
    """The drafting methods."""

    DRAFT_MODEL = "draft_model"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    LOOKAHEAD = "lookahead"
    EARLY_EXIT = "early_exit"
    SPARSE = "sparse"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    PARALLEL_DRAFT = "parallel_draft"
    DFLASH = "dflash"
    HYBRID = "hybrid"
    PLUGIN = "plugin"  # a drafter of another package: `plugins`


class Location(enum.StrEnum):
    """Where a drafter runs."""

    POOL = "pool"  # in replicas of its own
    VERIFIER = "verifier"  # in every verifier's engine process


# whole models
WHOLE_MODELS = (Method.DRAFT_MODEL, Method.PARALLEL_DRAFT)
# they read the target's KV, and so must run in the verifier
TARGET_DERIVED = (Method.EARLY_EXIT, Method.SPARSE)
# they read tokens only: no checkpoint, nothing to load
MODEL_FREE = (Method.NGRAM, Method.SUFFIX, Method.LOOKAHEAD)
# heads that continue from their own states
EAGLE_LIKE = (Method.EAGLE, Method.EAGLE3, Method.MTP)
# they read the target's hidden states
STATE_READING = (Method.MEDUSA, Method.MLP_SPECULATOR, *EAGLE_LIKE, Method.DFLASH)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """One drafter's kind and shape. Raises `ValueError` naming the field that is out of range."""

    method: Method = Method.DRAFT_MODEL
    model: str | None = None  # checkpoint of the draft model or head; several: `models`
    models: tuple[str, ...] = ()  # checkpoints by draft position (PRISM); the last one serves the rest
    num_speculative_tokens: int = 4
    location: Location = Location.POOL
    num_tree_nodes: int = 0  # draft trees of so many tokens; 0: chains
    tree_method: str = "sampled"  # unseeded: sampled without replacement | top_k: the likeliest
    draft_sample_method: str = "probabilistic"  # greedy: the likeliest tokens, as point masses
    rejection_sample_method: AcceptanceRule = AcceptanceRule.STANDARD
    draft_tensor_parallel_size: int = 1
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 4.0
    suffix_decoding_min_token_prob: float = 0.1
    lookahead_window: int = 5
    lookahead_ngram_size: int = 4
    exit_layer: int | None = None  # early exit after so many layers; None: a third of them
    sparse_num_blocks: int = 8  # KV blocks that sparse self-speculation attends to
    vocabulary: str = "same"  # same | text: another, translated as text | intersect: another, common tokens only
    state_dtype: str = "auto"  # of hidden states on the link; auto: the target's
    tensor_transport: str = "auto"  # channel of hidden states to a pool: auto, grpc (none: in frames), gloo or nccl
    # running ahead of a pool's draft model or EAGLE head: outcomes of a verification to draft for meanwhile; 0: none;
    # None: the default, which for a head is 0
    ahead_branches: int | None = None
    methods: tuple[Method, ...] = ()  # of a hybrid, in prior order
    plugin: str = ""  # the entry point's name
    plugin_config: str = ""  # the plug-in's options: a JSON object as text, which is hashable; "": none

    def __post_init__(self) -> None:
        require(1 <= self.num_speculative_tokens <= MAX_DRAFT_LENGTH, "num_speculative_tokens", "in [1, 64]")
        require(0 <= self.num_tree_nodes <= MAX_TREE_NODES, "num_tree_nodes", "in [0, 256]")
        require(self.tree_method in ("top_k", "sampled"), "tree_method", "top_k or sampled")
        methods = ("probabilistic", "greedy")
        require(self.draft_sample_method in methods, "draft_sample_method", "probabilistic or greedy")
        require(self.draft_tensor_parallel_size >= 1, "draft_tensor_parallel_size", "at least 1")
        require(
            1 <= self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            "at least 1 and at most prompt_lookup_max",
        )
        require(self.suffix_decoding_max_tree_depth >= 2, "suffix_decoding_max_tree_depth", "at least 2")
        require(self.suffix_decoding_max_cached_requests >= 0, "suffix_decoding_max_cached_requests", "at least 0")
        require(self.suffix_decoding_max_spec_factor > 0, "suffix_decoding_max_spec_factor", "positive")
        require(0 <= self.suffix_decoding_min_token_prob <= 1, "suffix_decoding_min_token_prob", "in [0, 1]")
        require(self.lookahead_window >= 1, "lookahead_window", "at least 1")
        require(self.lookahead_ngram_size >= 2, "lookahead_ngram_size", "at least 2")
        require(self.exit_layer is None or self.exit_layer >= 1, "exit_layer", "at least 1")
        require(self.sparse_num_blocks >= 2, "sparse_num_blocks", "at least 2")
        require(self.state_dtype in DTYPES, "state_dtype", f"one of {', '.join(DTYPES)}")
        require(self.tensor_transport in TRANSPORTS, "tensor_transport", f"one of {', '.join(TRANSPORTS)}")
        require(self.vocabulary in ("same", "text", "intersect"), "vocabulary", "same, text or intersect")
        is_ahead_in_range = self.ahead_branches is None or 0 <= self.ahead_branches <= MAX_AHEAD_BRANCHES
        require(is_ahead_in_range, "ahead_branches", f"in [0, {MAX_AHEAD_BRANCHES}]")
        self._check_combination()

    def _check_combination(self) -> None:
        """Raise `ValueError` for an impossible combination; the text says why."""
        for method in self.all_methods:
            if method in TARGET_DERIVED and self.location is Location.POOL:
                raise ValueError(f"location: {method} reads the target's own KV, so it runs in the verifier alone")
        if self.methods and self.method is not Method.HYBRID:
            raise ValueError("methods belong to the method hybrid")
        if self.method is Method.HYBRID and (len(set(self.methods)) < 2 or Method.HYBRID in self.methods):
            raise ValueError("methods must name two or more drafters other than hybrid")
        with_checkpoint = [method for method in self.methods if _needs_checkpoint(method)]
        if len(with_checkpoint) > 1:
            raise ValueError(f"methods: {with_checkpoint[0]} and {with_checkpoint[1]} need a checkpoint each")
        if sum(method in STATE_READING for method in self.methods) > 1:
            raise ValueError("methods: at most one of a hybrid's drafters may read hidden states")
        self._check_plugin()
        if self.models and self.method not in (Method.EAGLE, Method.EAGLE3):
            raise ValueError("models: parameter sets by position are for eagle and eagle3")
        if self.models and self.num_tree_nodes:
            raise ValueError("num_tree_nodes: parameter sets by position draft a chain")
        if self.vocabulary != "same" and self.method is not Method.DRAFT_MODEL:
            raise ValueError("vocabulary: only a draft model may have another tokenizer")
        if self.vocabulary == "text" and self.num_tree_nodes:
            raise ValueError("num_tree_nodes: a draft that goes by way of text is a chain")
        if self.rejection_sample_method is AcceptanceRule.BLOCK and self.num_tree_nodes:
            raise ValueError("rejection_sample_method: block verification is for chains")
        if self.ahead_branches and not self.can_run_ahead:
            raise ValueError("ahead_branches: only draft models of the target's vocabulary and EAGLE heads in a pool")
        if self.draft_tensor_parallel_size > 1 and not set(self.all_methods) <= set(WHOLE_MODELS):
            raise ValueError(f"draft_tensor_parallel_size: {self.method} runs on one rank")
        if self.draft_tensor_parallel_size > 1 and self.location is Location.VERIFIER:
            raise ValueError("draft_tensor_parallel_size: a drafter in the verifier runs on one rank")

    def _check_plugin(self) -> None:
        if Method.PLUGIN not in self.all_methods:
            if self.plugin or self.plugin_config:
                raise ValueError(f"{'plugin' if self.plugin else 'plugin_config'}: no method here is a plug-in")
            return
        require(bool(self.plugin), "plugin", "the name of an entry point")
        if self.method is Method.PLUGIN and self.model is not None:
            raise ValueError("model: a plug-in is told its files in plugin_config")

    @property
    def can_run_ahead(self) -> bool:
        """Whether the drafter has spare time, and can draft for several outcomes."""
        is_able = self.method in (Method.DRAFT_MODEL, *EAGLE_LIKE) and self.vocabulary == "same"
        return is_able and self.location is Location.POOL

    @property
    def num_ahead_branches(self) -> int:
        """The number of outcomes of a verification to draft for in spare time."""
        # a head is fast beside a verification, and drafts from its own states are accepted less: the embedded EAGLE-3
        # head answers half of the rounds at once, with 6% fewer tokens per round (greedy, 8 outcomes)
        usual = USUAL_AHEAD_BRANCHES if self.can_run_ahead and self.method is Method.DRAFT_MODEL else 0
        return usual if self.ahead_branches is None else self.ahead_branches

    @property
    def all_methods(self) -> tuple[Method, ...]:
        return self.methods or (self.method,)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a draft model or head must be given."""
        return any(_needs_checkpoint(method) for method in self.all_methods)


def _needs_checkpoint(method: Method) -> bool:
    # MTP layers are in the target's checkpoint; a plug-in loads its own files
    return method not in (*MODEL_FREE, *TARGET_DERIVED, Method.MTP, Method.PLUGIN)
