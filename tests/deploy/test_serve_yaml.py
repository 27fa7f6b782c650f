from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.config import ServiceConfig

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "serve.yaml"


def test_serve_accepts_the_manifest_and_we_its_options():
    schema = ServeDeploySchema.model_validate(yaml.safe_load(MANIFEST.read_text()))
    (application,) = schema.applications
    assert application.import_path == "outrider.cluster.app:build_app"
    config = ServiceConfig.from_mapping(application.args)
    assert config.drafter_spec is not None
