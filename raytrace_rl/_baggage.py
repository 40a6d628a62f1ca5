"""The user's own baggage (https://www.w3.org/TR/baggage/), into carriers and out of them.

OpenTelemetry's part of it is imported when there may be some: it costs every worker 3 ms at its start, and baggage
that is set anywhere was set through it.
"""

from __future__ import annotations

import sys

from opentelemetry.context import Context


def write(carrier: dict[str, str], context: Context) -> None:
    """Writes the baggage of ``context``, if it holds any, under ``baggage``."""
    get_all = getattr(sys.modules.get("opentelemetry.baggage"), "get_all", None)
    if get_all is not None and get_all(context):
        from opentelemetry.baggage.propagation import W3CBaggagePropagator

        W3CBaggagePropagator().inject(carrier, context)


def read(header: str, onto: Context) -> Context:
    """Returns ``onto`` with the baggage of a header; ``onto`` itself if there is none in it."""
    from opentelemetry import baggage
    from opentelemetry.baggage.propagation import W3CBaggagePropagator

    for name, value in baggage.get_all(W3CBaggagePropagator().extract({"baggage": header}, Context())).items():
        onto = baggage.set_baggage(name, value, onto)
    return onto
