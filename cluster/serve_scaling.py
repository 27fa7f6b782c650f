"""`outrider.cluster.serve_scaling:ServicePolicy`: the name under which Serve's configurations import the policy."""

from __future__ import annotations

from outrider.cluster.scaling.serve_scaling import ServicePolicy

__all__ = ["ServicePolicy"]
