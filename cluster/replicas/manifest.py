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
from ray.serve.config import ProxyLocation
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from outrider.cluster.common.api_keys import with_api_key_hashes
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.app import OptionsError, build_app
from outrider.cluster.router.fleet import RouterPolicy, with_changes
from outrider.cluster.scaling.serve_scaling import ServicePolicy, is_learner, learner_deployment

IMPORT_PATH = "outrider.cluster.app:build_app"
POLICY_PATH = "outrider.cluster.serve_scaling:ServicePolicy"


def check_manifest(text: str) -> list[str]:
    """Return the names of our applications in a YAML of Serve, or in a RayService of KubeRay.

    Raises `ValueError` with one line that names the field.
    """
    schema = _schema(text)
    ours = [found for found in schema.applications if found.import_path == IMPORT_PATH]
    if not ours:
        raise ValueError(f"applications: none has the import_path {IMPORT_PATH}")
    for application in ours:
        try:
            _check(application, schema)
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


def _proxy_port(schema: ServeDeploySchema) -> int | None:
    """Return where Serve's proxies listen; None: there are none."""
    return None if schema.proxy_location is ProxyLocation.Disabled else schema.http_options.port


def _check(application: ServeApplicationSchema, schema: ServeDeploySchema) -> None:
    config, proxy_port = ServiceConfig(**with_api_key_hashes(application.args, os.environ)), _proxy_port(schema)
    if proxy_port is not None:
        config.require_admin(f"http_options: host {schema.http_options.host}, port {proxy_port},")
    build_app(dict(application.args))
    if config.listens_itself and config.port == proxy_port:
        raise ValueError(f"port: gateways and Serve's proxy would share {proxy_port}; set proxy_location: Disabled")
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
