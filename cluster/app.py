"""The names under which Serve's configurations import the applications: `outrider.cluster.app:build_app` and its like."""

from __future__ import annotations

from outrider.cluster.replicas.app import build_app, build_drafters_app

__all__ = ["build_app", "build_drafters_app"]
