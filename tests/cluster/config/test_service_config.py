from pathlib import Path

import pytest
import torch

from outrider.cluster.config import model_options
from outrider.cluster.config.placement import PoolPlacement
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.config.verifier_main import verifier_main
from outrider.cluster.router.fleet import PolicyMode, VerifierRole
from outrider.drafter_service import embedded
from outrider.drafter_service.service.speculative_config import Location, Method
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.request import LogprobsMode


def test_nothing_given_serves_the_embedded_pair():
    config = ServiceConfig()
    assert config.model.target_path == str(embedded.target_path())
    assert config.drafter_spec.model.path == str(embedded.draft_path())
    assert config.model.name == "outrider-embedded"


def test_rollouts_are_asked_for_and_our_own_engines():
    assert not ServiceConfig().verifier_spec.rollouts
    assert ServiceConfig(rollouts=True).verifier_spec.rollouts
    with pytest.raises(ValueError, match="rollouts"):
        ServiceConfig(model="m", engine="vllm", rollouts=True)
    plain, admin = "0" * 64, f"{'1' * 64}:admin"
    for beyond in ({}, {"api_key_hashes": [plain]}, {"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_ca_certs": "a"}):
        with pytest.raises(
            ValueError, match=r"rollouts: whoever reaches host 0\.0\.0\.0 could .*; add --admin-api-key"
        ):
            ServiceConfig(rollouts=True, host="0.0.0.0", **beyond)
    ours = ServiceConfig(rollouts=True, host="0.0.0.0", api_key_hashes=[plain, admin])
    assert ours.gateway.api_key_hashes == (plain, admin)
    assert ServiceConfig(rollouts=True, host="127.0.0.7").verifiers.rollouts
    assert ServiceConfig(rollouts=True, num_gateways="1:2").gateway.num_gateways.most == 2
    with pytest.raises(ValueError, match="rejection_sample_method must be lossless in rollouts"):
        ServiceConfig(rollouts=True, speculative_config={"rejection_sample_method": "typical"})


def test_links_take_orders_in_rollouts_alone_and_drafters_that_learn_follow_their_learner():
    assert not ServiceConfig().control_rules.is_open
    assert not ServiceConfig(learner={}).control_rules.is_open, "its drafters ask the learner, nobody tells them"
    rules = ServiceConfig(rollouts=True, weights_root="/w").control_rules
    assert (rules.is_open, rules.weights_root) == (True, "/w")
    assert ServiceConfig(kv_peers=["127.0.0.1:9", "[::1]:8"]).gateway.kv_peers, "on this machine nothing is asked for"
    for options, takes_orders in (({}, False), ({"learner": {}}, True), ({"rollouts": True}, True)):
        config = ServiceConfig(model="m", draft_model="d", **options)
        assert [spec.takes_orders for spec in config.drafter_specs] == [takes_orders]


def test_with_tls_gateways_always_listen_themselves_else_where_it_is_asked_for():
    assert not ServiceConfig().listens_itself
    assert ServiceConfig(own_listener=True).listens_itself
    assert ServiceConfig(ssl_certfile="pem", ssl_keyfile="key").listens_itself


def test_without_keys_strangers_share_a_cache_unless_the_service_listens_to_its_own_machine_alone():
    far = {"host": "0.0.0.0"}
    assert ServiceConfig(own_listener=True, **far).is_shared_by_strangers
    assert ServiceConfig().is_shared_by_strangers, "Serve's proxy listens where Serve was told to"
    assert not ServiceConfig(own_listener=True).is_shared_by_strangers
    assert not ServiceConfig(own_listener=True, api_key_hashes=["0" * 64], **far).is_shared_by_strangers


def test_a_target_without_a_drafter_looks_its_drafts_up():
    config = ServiceConfig(model="some/model")
    assert config.drafter_spec.model is None
    assert (config.speculative.method, config.speculative.location) == (Method.SUFFIX, Location.VERIFIER)
    assert config.drafter_spec is not None
    assert config.pools == {}


@pytest.mark.parametrize("model", [None, "some/model"])
def test_no_drafters_means_that_nothing_drafts(model):
    assert ServiceConfig(model=model, num_drafters=0).drafter_spec is None


@pytest.mark.parametrize(
    ("options", "drafting"),
    [
        ({}, "draft_model by 1 drafter"),
        ({"model": "m"}, "suffix in the verifier"),
        ({"model": "m", "num_drafters": 0}, "nobody"),
        ({"model": "m", "num_speculative_tokens": 0}, "nobody"),
        ({"model": "m", "draft_model": "d", "num_drafters": "1:3"}, "draft_model by 1:3 drafters"),
        ({"model": "m", "drafter_pools": [{"name": "look", "method": "ngram"}]}, "ngram by 1 drafter"),
        ({"drafter_pools": [{"name": "look", "method": "ngram"}]}, "draft_model by 1 drafter and ngram by 1 drafter"),
    ],
)
def test_who_drafts_is_told(options, drafting):
    assert ServiceConfig(**options).who_drafts == drafting


def test_each_side_gets_its_own_degree_of_tensor_parallelism():
    config = ServiceConfig(
        model="m", draft_model="d", tensor_parallel_size=4, draft_tensor_parallel_size=2, num_drafters=3
    )
    assert config.verifier_spec.model.tensor_parallel_size == 4
    assert config.drafter_spec is not None
    assert config.drafter_spec.model.tensor_parallel_size == 2
    assert config.num_ranks == 4 + 3 * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_drafter": 2}, "did you mean 'num_drafters'"),
        ({"zzz": 2}, "unknown option 'zzz'"),
        ({"max_queued_requests": 0}, "max_queued_requests must be at least 1"),
        ({"failover_timeout_s": 0.0}, "failover_timeout_s must be positive"),
        ({"engine_timeout_s": "-1"}, "engine_timeout_s must be positive"),
        ({"num_verifiers": 0}, "num_verifiers must be at least 1"),
        ({"num_gateways": "0"}, "num_gateways must be at least 1"),
        ({"num_prefill_verifiers": 1, "engine": "vllm"}, "num_prefill_verifiers: roles are our own engine's"),
        ({"num_prefill_verifiers": 1, "rollouts": True}, "num_prefill_verifiers: in rollouts"),
        ({"kv_peers": ["http://host/path"]}, "kv_peers must be HOST or HOST:PORT"),
        ({"kv_peers": ["10.0.0.7"]}, "kv_peers: beyond this machine both services need one --link-secret-file"),
        ({"kv_peers": ["127.0.0.1:9"], "internal_host": "auto"}, "kv_peers: beyond this machine"),
        ({"num_drafters": "3:1"}, "num_drafters must be a number, or min:max .* not '3:1'"),
        ({"drafter_resources": "[1]"}, "drafter_resources: Input should be a valid dictionary"),
        ({"drafter_labels": "{"}, "drafter_labels: Invalid JSON"),
        ({"speculative_config": "{"}, "speculative_config: Invalid JSON"),
        ({"verifier_labels": ["a"]}, "verifier_labels: Input should be a valid dictionary"),
        ({"verifier_resources": {"gpu": "many"}}, "verifier_resources: Input should be a valid number"),
        ({"port": "eighty"}, "port: Input should be a valid integer"),
        ({"port": None}, "port: Input should be a valid integer"),
        ({"port": 70000}, "port must be at most 65535"),
        ({"port": 0}, "port must be at least 1"),
        ({"port": 9000, "grpc_port": 9000}, "grpc_port must be another one than port"),
        ({"max_num_seqs": 1.5}, "max_num_seqs: Input should be a valid integer"),
        ({"gpu_share": "half"}, "gpu_share: Input should be a valid number"),
        ({"drain_timeout_s": "inf"}, "drain_timeout_s must be finite"),
        ({"drain_timeout_s": "nan"}, "drain_timeout_s must be finite"),
        ({"dtype": "int4"}, "dtype must be auto, float32, float16 or bfloat16"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"api_key_hashes": "not-a-hash"}, "api_key_hashes: Invalid JSON"),
        ({"drain_timeout_s": 0}, "drain_timeout_s must be positive"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be at least 0"),
        ({"speculation": "sometimes"}, "speculation must be"),
        ({"draft_length_by_batch_size": "[[2, 4, 1]]"}, "draft_length_by_batch_size must begin at batch size 1"),
        ({"draft_length_by_batch_size": "[[1, 4]]"}, "draft_length_by_batch_size: "),
        ({"draft_length_by_batch_size": "["}, "draft_length_by_batch_size: Invalid JSON"),
        ({"draft_length_by_batch_size": [[1, 4, 5]]}, "at most num_speculative_tokens"),
        ({"enable_prefix_caching": "maybe"}, "enable_prefix_caching: Input should be a valid boolean"),
    ],
)
def test_bad_options_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        ServiceConfig(**values)


def test_gpus_are_reserved_where_the_device_says_so_whatever_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # Ray's head node in deploy/kuberay
    on_gpus = ServiceConfig(device="cuda", gpu_share=0.5)
    assert on_gpus.verifier_placement.serve_options["placement_group_bundles"][1]["GPU"] == 0.5
    assert on_gpus.model.settled_device == "cuda"
    assert ServiceConfig().model.settled_device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ServiceConfig().model.settled_device == "cpu", "where there is no device, torch is not asked"
    monkeypatch.setattr(model_options, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    assert ServiceConfig().model.settled_device == "cuda"
    assert (ServiceConfig().model.gpus_per_rank, ServiceConfig(device="cpu").model.gpus_per_rank) == (1.0, 0.0)


def test_pools_are_sized_by_the_most_replicas_they_may_have():
    config = ServiceConfig(num_verifiers="1:2", num_drafters="1:3", max_num_seqs=10)
    assert (config.num_ranks, config.num_shells) == (5, 6)
    assert config.drafter_spec is not None
    assert config.drafter_spec.max_sessions == 20


def test_verifiers_for_prompts_are_verifiers_with_a_place_of_their_own():
    config = ServiceConfig(
        device="cpu",
        num_verifiers=2,
        num_prefill_verifiers="1:3",
        num_drafters=1,
        tensor_parallel_size=2,
        max_num_seqs=10,
        verifier_labels={"pool": "decode"},
        prefill_verifier_labels={"pool": "prefill"},
        prefill_verifier_resources='{"big": 1}',
        kv_peers='["10.0.0.7", "other:50051", "[::1]:9"]',
        link_secret_file="s",
    )
    assert (config.num_ranks, config.num_shells) == (2 * (2 + 3) + 1, 2 + 3 + 1 + 1)
    assert config.drafter_spec is not None
    assert config.drafter_spec.max_sessions == 50, "without a verifier for decoding they decode, too"
    assert config.prefill_placement == PoolPlacement(num_ranks=2, resources={"big": 1}, labels={"pool": "prefill"})
    assert config.verifier_placement.labels == {"pool": "decode"}
    assert (config.role, ServiceConfig().role) == (VerifierRole.DECODE, VerifierRole.BOTH)


def test_options_change_under_their_flat_names_and_the_others_stay():
    options = {"model": "m", "draft_model": "d", "num_drafters": "1:3", "port": 81, "num_gateways": 2, "seed": 7}
    config = ServiceConfig(**options)
    changed = config.with_options(device="cpu", num_drafters=0, speculative_config={"method": "ngram"})
    assert changed == ServiceConfig(
        **{**options, "device": "cpu", "num_drafters": 0, "speculative_config": {"method": "ngram"}}
    )
    assert (
        changed.with_options(device="auto", num_drafters="1:3", speculative_config={})
        == config
        == ServiceConfig(**options)
    )
    with pytest.raises(ValueError, match="unknown option 'prot'; did you mean 'port'"):
        config.with_options(prot=1)


LOOKUP = {"name": "lookup", "method": "ngram", "num_drafters": "0:2", "prompt_lookup_max": 3}


def test_further_pools_of_drafters_are_services_with_another_way_of_drafting():
    config = ServiceConfig(
        num_drafters=2, num_speculative_tokens=4, drafter_labels={"pool": "gpu"}, drafter_pools=(LOOKUP,)
    )
    first, lookup = config.pools["default"], config.pools["lookup"]
    assert list(config.pools) == ["default", "lookup"]
    assert (first.speculative.method, first.num_drafters.most) == ("draft_model", 2)
    assert first.drafter_labels == {"pool": "gpu"}
    assert (lookup.speculative.method, lookup.speculative.prompt_lookup_max) == ("ngram", 3)
    assert (lookup.num_drafters.fewest, lookup.num_drafters.most) == (0, 2)
    assert config.drafter_spec_of(lookup).model is None
    assert (config.num_ranks, config.num_shells) == (1 + 2 + 2, 1 + 4 + 1)


def test_a_table_is_of_the_whole_service_and_bounded_by_its_longest_drafts():
    short, long = LOOKUP | {"num_speculative_tokens": 2}, LOOKUP | {"num_speculative_tokens": 8}
    assert ServiceConfig(drafter_pools=(short,), draft_length_by_batch_size=((1, 8, 4),)).pools["lookup"]
    assert ServiceConfig(drafter_pools=(long,), draft_length_by_batch_size=((1, 8, 6),)).pools["lookup"]
    with pytest.raises(ValueError, match="at most num_speculative_tokens"):
        ServiceConfig(drafter_pools=(short,), draft_length_by_batch_size=((1, 8, 6),))


def test_eager_steps_are_asked_of_verifiers_and_drafters_alike():
    for is_eager in (False, True):
        config = ServiceConfig(enforce_eager=is_eager)
        assert config.drafter_spec is not None
        assert config.drafter_spec.model is not None
        assert config.verifier_spec.model.enforce_eager is config.drafter_spec.model.enforce_eager is is_eager


def test_experts_in_host_memory_are_the_targets():
    config = ServiceConfig(num_cached_experts=8)
    assert config.drafter_spec is not None
    assert config.drafter_spec.model is not None
    assert config.verifier_spec.model.num_cached_experts == 8
    assert config.drafter_spec.model.num_cached_experts is None


@pytest.mark.parametrize("is_async", [True, False])
def test_asynchronous_scheduling_is_asked_of_verifiers(is_async: bool):
    assert ServiceConfig(async_scheduling=is_async).verifier_spec.async_scheduling is is_async


def test_the_mode_of_log_probabilities_is_one_of_vllms_words():
    assert ServiceConfig().logprobs_mode is LogprobsMode.RAW
    assert ServiceConfig(logprobs_mode="processed_logprobs").logprobs_mode is LogprobsMode.PROCESSED
    with pytest.raises(ValueError, match="logprobs_mode"):
        ServiceConfig(logprobs_mode="processed_logits")


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, True),
        ({"generation_config": "vllm"}, False),
        ({"rollouts": True}, False),
        ({"rollouts": True, "generation_config": "auto"}, True),
    ],
)
def test_a_models_sampling_is_read_unless_a_trainer_samples(options, reads):
    assert ServiceConfig(**options).reads_generation_config is reads


def test_who_never_speculates_has_no_drafters():
    config = ServiceConfig(num_speculative_tokens=0, drafter_pools=(LOOKUP | {"num_speculative_tokens": 4},))
    assert [*config.pools] == ["lookup"]
    assert not ServiceConfig(num_speculative_tokens=0).pools


def test_an_objects_options_come_as_json_from_the_serve_command_line():
    text = '{"method": "eagle", "model": "d", "num_speculative_tokens": 3}'
    assert ServiceConfig(speculative_config=text) == ServiceConfig(
        draft_model="d", num_speculative_tokens=3, speculative_config={"method": "eagle"}
    )


def test_pools_come_as_json_from_the_serve_command_line():
    config = ServiceConfig(drafter_pools='[{"name": "lookup", "method": "ngram"}]')
    assert [*config.pools] == ["default", "lookup"]


def test_a_pool_may_stand_beside_a_drafter_in_the_verifier_or_alone():
    beside = ServiceConfig(speculative_config={"method": "suffix", "location": "verifier"}, drafter_pools=(LOOKUP,))
    alone = ServiceConfig(num_drafters=0, drafter_pools=(LOOKUP,))
    assert [*beside.pools] == [*alone.pools] == ["lookup"]
    assert (beside.own_drafter is None, alone.own_drafter is None) == (False, True)


def test_a_verifier_keeps_what_any_pool_reads_and_takes_the_largest_trees_and_longest_drafts():
    eagle = {"name": "heads", "method": "eagle3", "num_tree_nodes": 12, "num_speculative_tokens": 6}
    config = ServiceConfig(drafter_pools=(LOOKUP, eagle), speculative_config={"state_dtype": "bfloat16"})
    alone = ServiceConfig(speculative_config={"method": "eagle3", "num_tree_nodes": 12, "state_dtype": "bfloat16"})
    assert config.verifier_spec == alone.verifier_spec
    assert config.verifier_spec.model.state_taps
    assert config.pools["heads"].speculative.state_dtype == "bfloat16"
    assert config.router_policy.max_draft_length == 6


def test_pools_that_read_other_states_are_refused():
    heads = {"name": "heads", "method": "medusa"}
    config = ServiceConfig(speculative_config={"method": "eagle3"}, drafter_pools=(heads,))
    with pytest.raises(ValueError, match="drafter_pools: those that read hidden states must read the same"):
        config.verifier_spec  # noqa: B018


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"method": "ngram"}, "name must be a word other than 'default', not None"),
        ({"name": "default", "method": "ngram"}, "name must be a word other than 'default'"),
        ({"name": "a b", "method": "ngram"}, "name must be a word"),
        ({"name": "x", "method": "ngam"}, "x: speculative_config: unknown method 'ngam'; did you mean 'ngram'"),
        ({"name": "x", "num_drafter": 1}, "x: speculative_config: unknown key 'num_drafter'"),
        ({"name": "x", "method": "ngram", "num_drafters": "2:1"}, "x: num_drafters must be a number, or min:max"),
        ({"name": "x", "method": "eagle"}, "x: speculative_config: model: eagle needs a checkpoint"),
        ({"name": "x", "method": "ngram", "num_drafters": 0}, "x: it would have no drafter"),
        ({"name": "x", "method": "ngram", "num_speculative_tokens": 0}, "x: it would have no drafter"),
        ({"name": "x", "method": "suffix", "location": "verifier"}, "x: location: a drafter in the verifier is no"),
        ({"name": "x", "method": "ngram", "state_dtype": "float32"}, "x: 'state_dtype' is of the whole service"),
        ({"name": "x", "num_speculative_tokens_per_batch_size": []}, "x: 'num_spec.*' is of the whole service"),
        ({"name": "x", "method": "ngram", "draft_tensor_parallel_size": 2}, "x: .*ngram runs on one rank"),
    ],
)
def test_a_bad_pool_is_refused_by_its_name_and_key(pool, message):
    with pytest.raises(ValueError, match=f"drafter_pools: {message}"):
        ServiceConfig(drafter_pools=[pool])


def test_two_pools_of_a_name_are_refused():
    with pytest.raises(ValueError, match="drafter_pools: lookup: there are two of that name"):
        ServiceConfig(drafter_pools=(LOOKUP, LOOKUP))


def test_strings_of_the_serve_command_line_become_values():
    config = ServiceConfig(port="81", enable_prefix_caching="false", model="123", max_model_len="64")
    assert (config.port, config.verifiers.enable_prefix_caching) == (81, False)
    assert (config.model.model, config.model.max_model_len) == ("123", 64)


@pytest.mark.parametrize("mode", ["auto", "always", "off"])
def test_speculation_option_becomes_the_routers_policy(mode: str):
    policy = ServiceConfig(speculation=mode, num_speculative_tokens=5).router_policy
    assert policy.mode is PolicyMode(mode)
    assert policy.max_draft_length == 5


@pytest.mark.parametrize("table", ["[[1, 4, 3], [5, 64, 0]]", [[1, 4, 3], [5, 64, 0]]])
def test_a_table_of_draft_lengths_becomes_the_routers_policy(table: object):
    policy = ServiceConfig(draft_length_by_batch_size=table).router_policy
    assert policy.draft_length_by_batch_size == ((1, 4, 3), (5, 64, 0))


def test_states_are_kept_and_sent_as_the_options_say():
    config = ServiceConfig(device="cpu", speculative_config={"state_dtype": "bfloat16", "tensor_transport": "gloo"})
    assert config.verifier_spec.model.state_dtype == "bfloat16"
    assert config.speculative.tensor_transport == "gloo"


LINK_FILES = {"link_ssl_certfile": "c", "link_ssl_keyfile": "k", "link_ssl_ca_certs": "a"}


@pytest.mark.parametrize(
    ("choice", "files", "offered"),
    [("auto", {}, ("gloo",)), ("auto", LINK_FILES, ()), ("grpc", {}, ()), ("gloo", {}, ("gloo",))],
)
def test_both_ends_of_a_link_offer_the_same_channels(choice: str, files: dict[str, str], offered: tuple[str, ...]):
    values = {"speculative_config": {"tensor_transport": choice}, **files}
    config = ServiceConfig(**values)
    assert config.tensor_transports == offered
    main = verifier_main(config, "10.0.0.1")
    assert isinstance(main, VerifierSpec)
    assert (main.tensor_transport, main.tensor_host) == ((offered[0], "10.0.0.1") if offered else ("", "")), "for KV"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"speculative_config": {"state_dtype": "int8"}},
            "state_dtype must be auto, float32, float16 or bfloat16",
        ),
        ({"speculative_config": {"tensor_transport": "ucx"}}, "tensor_transport must be auto, grpc"),
        ({"speculative_config": {"tensor_transport": "nccl"}, "device": "cpu"}, "nccl needs the device cuda"),
        (
            {"speculative_config": {"tensor_transport": "gloo"}, **LINK_FILES},
            "gloo is not encrypted",
        ),
    ],
)
def test_channels_that_cannot_be_are_refused(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ServiceConfig(**values)
