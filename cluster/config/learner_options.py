"""Who trains a pool's drafters while they serve: the options of a pool's learner, off where there are none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from outrider.cluster.common.hints import did_you_mean
from outrider.cluster.common.options import Options, Positive, json_value
from outrider.drafter_service.learning.messages import LearnerSettings
from outrider.verifier_service.cache import cache_folder
from outrider.verifier_service.model.config import Device

MAX_TOP_TOKENS = 64
USUAL = LearnerSettings()
SETTINGS = tuple(field.name for field in dataclasses.fields(LearnerSettings))  # they may change while it runs
UNSAFE = re.compile(r"[^\w.-]+")  # in a folder's name

Share = Annotated[float, Field(ge=0, le=1)]


class LearnerOptions(Options):
    """A learner, where it keeps its versions, and what it may take. {} is one with all defaults."""

    folder: str | None = None  # None: in this user's cache folder
    export_root: str | None = None  # below which `export` writes; None: exports in the learner's folder
    sample_share: Share = USUAL.sample_share
    shadow_share: Share = USUAL.shadow_share
    num_steps: Positive = USUAL.num_steps
    min_samples: Positive = USUAL.min_samples
    rate_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = USUAL.rate_scale
    reward_weighted: bool = USUAL.reward_weighted
    max_bytes: Positive = 1 << 30  # of samples, in memory
    device: Device = "auto"
    num_threads: Positive = 1  # of the idle class: they run where nothing else does
    num_gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    num_top: Annotated[int, Field(ge=0, le=MAX_TOP_TOKENS)] = 0  # of the target's likeliest tokens, at each position

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.device == "cuda" and not self.num_gpus:  # Ray hides the devices of who asks for none
            raise ValueError("num_gpus must be positive with the device cuda")
        return self

    @property
    def settings(self) -> LearnerSettings:
        return LearnerSettings(**{name: getattr(self, name) for name in SETTINGS})

    def changed_settings(self, changes: Mapping[str, Any]) -> LearnerSettings:
        """Return the settings with some changed; raises `ValueError` naming the one that is wrong."""
        for name in changes:
            if name in SETTINGS:
                continue
            if name in type(self).model_fields:
                raise ValueError(f"{name} holds from the learner's start: only {', '.join(SETTINGS)} change meanwhile")
            raise ValueError(f"unknown learner setting {name!r}{did_you_mean(str(name), SETTINGS)}")
        return LearnerOptions(**{**dict(self), **changes}).settings

    def folder_for(self, target: str, pool: str) -> str:
        """Return the folder of the versions: by default one of this user's for each target and pool."""
        if self.folder is not None:
            return str(Path(self.folder).expanduser().absolute())
        return str(cache_folder() / "learner" / UNSAFE.sub("-", target).strip("-.") / pool)

    def export_root_for(self, folder: str) -> str:
        """Return the folder below which a learner whose versions are in `folder` writes exports."""
        root = Path(folder) / "exports" if self.export_root is None else Path(self.export_root).expanduser().absolute()
        return str(root)


def read_learner(value: Any) -> LearnerOptions | None:
    """Read a pool's `learner`: an object, or its JSON text; None and null: the pool does not learn."""
    given = json_value(value)
    if given is None or isinstance(given, LearnerOptions):
        return given
    if not isinstance(given, Mapping):
        raise ValueError("must be an object of options; {} is a learner with all defaults, null is none")
    return LearnerOptions(**given)
