"""Asynchronous GRPO on local Ray, traced from the driver to every actor: ``python -m examples.async_grpo``."""

from __future__ import annotations

import logging

# In every process: what the workers say at this level is for the log bridge (RAYTRACE_RL_LOGS_ENABLED=1). Without it
# Python prints warnings and worse, as always.
logging.getLogger(__name__).setLevel(logging.INFO)
