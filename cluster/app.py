"""`outrider.cluster.app:build_app`: the name under which Serve's configurations import the application."""

from __future__ import annotations

from outrider.cluster.replicas.app import build_app

__all__ = ["build_app"]
