"""What is imported before this module stays, and no garbage collection looks at it: those of forked processes, too."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
