"""Reads what a run left behind, and says where its time went. Needs neither ray, torch, protobuf nor the OTel SDK."""

from __future__ import annotations

from raytrace_rl.monitor.load import load_run
from raytrace_rl.monitor.model import Process, Run, SpanRow, UnreadableRunError
from raytrace_rl.monitor.signals import LogRow, MetricRow

__all__ = ["LogRow", "MetricRow", "Process", "Run", "SpanRow", "UnreadableRunError", "load_run"]
