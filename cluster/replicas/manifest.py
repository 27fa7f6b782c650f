"""Check a YAML of Ray Serve as Serve and the replicas will read it, before anything is started.

`serve run FILE` and `serve deploy FILE` pass the file to Serve's controller: an error in our options appears in a task
there, and `serve run` goes on waiting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from outrider.cluster.common.api_keys import with_api_key_hashes
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.app import OptionsError, build_app
from outrider.cluster.router.fleet import RouterPolicy, with_changes
from outrider.cluster.router.serve_scaling import ServicePolicy, is_learner, learner_deployment

IMPORT_PATH = "outrider.cluster.app:build_app"
POLICY_PATH = "outrider.cluster.serve_scaling:ServicePolicy"


def check_manifest(text: str) -> list[str]:
    """Return the names of our applications in a YAML of Serve, or in a RayService of KubeRay.

    Raises `ValueError` with one line that names the field.
    """
    ours = [found for found in _schema(text).applications if found.import_path == IMPORT_PATH]
    if not ours:
        raise ValueError(f"applications: none has the import_path {IMPORT_PATH}")
    for application in ours:
        try:
            _check(application)
        except (OptionsError, TypeError, ValueError) as error:  # TypeError: an unknown keyword of a policy
            raise ValueError(f"application {application.name}: {error}") from error
    return [application.name for application in ours]


def _schema(text: str) -> ServeDeploySchema:
    try:
        values: Any = yaml.safe_load(text)
        if isinstance(values, Mapping) and values.get("kind") == "RayService":
            values = yaml.safe_load(values["spec"]["serveConfigV2"])
        return ServeDeploySchema.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except KeyError as error:
        raise ValueError(f"spec.serveConfigV2: there is no {error}") from error


def _check(application: ServeApplicationSchema) -> None:
    build_app(dict(application.args))
    config = ServiceConfig(**with_api_key_hashes(application.args, os.environ))
    learners = {learner_deployment(name): pool.learner for name, pool in config.learning.items()}
    policy = application.autoscaling_policy or {}
    if policy.get("policy_function") == POLICY_PATH:
        settings = dict(policy.get("policy_kwargs") or {})
        settings.pop("recorded_to", None)  # a path on the head node
        ServicePolicy(**settings)
    for deployment in application.deployments:
        if deployment.name == "Router" and isinstance(deployment.user_config, Mapping):
            with_changes(RouterPolicy(), deployment.user_config)
        if isinstance(deployment.user_config, Mapping) and is_learner(deployment.name):
            learner = learners.get(deployment.name)
            if learner is None:
                raise ValueError(f"deployments: {deployment.name}: no such pool learns")
            learner.changed_settings(deployment.user_config)
