"""Imported last by the process that others are forked from: what a rank imports once it loads a model, 1,500 modules.

All that is imported stays, and the garbage collections of forked processes do not look at it.
"""

from __future__ import annotations

import gc

import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama  # noqa: F401

gc.collect()
gc.freeze()
