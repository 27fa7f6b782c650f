"""Ray Serve LLM's engine beside a pool of ours: what the manifest says of the pool and of the plug-in holds."""

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.app import build_drafters_app
from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.hosted.options import PluginOptions

MANIFEST = yaml.safe_load((Path(__file__).resolve().parents[2] / "deploy" / "ray_serve_llm.yaml").read_text())


def test_the_engine_drafts_from_the_pool_beside_it():
    llm, drafters = ServeDeploySchema.model_validate(MANIFEST).applications
    assert llm.import_path == "ray.serve.llm:build_openai_app"
    assert drafters.import_path == f"outrider.cluster.app:{build_drafters_app.__name__}"
    config = DraftersConfig(**drafters.args)
    (engine,) = llm.args["llm_configs"]
    options = PluginOptions(**engine["engine_kwargs"]["additional_config"]["outrider"])
    assert options.pool == f"127.0.0.1:{config.grpc_port}"
    speculative = engine["engine_kwargs"]["speculative_config"]
    assert (speculative["method"], speculative["model"]) == ("custom_class", "outrider.cluster.vllm.Drafts")
    assert speculative["num_speculative_tokens"] <= config.max_draft_length
    assert config.model.model == engine["model_loading_config"]["model_source"]
    assert str(config.num_verifiers) == str(engine["deployment_config"]["autoscaling_config"]["max_replicas"])
