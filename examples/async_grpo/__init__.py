"""Asynchronous GRPO on local Ray, traced from the driver to every actor: ``python -m examples.async_grpo``."""
