"""The node relay: forwards what the spools of a node hold to an OTLP endpoint, and remembers what was acknowledged.

Training processes hold no exporter and no channel; this is the one place that does. Nothing here is imported before a
process asks for a relay, and ``grpc`` only in the process in which one runs.
"""
