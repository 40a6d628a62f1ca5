from __future__ import annotations

import pytest

from raytrace_rl import _env_otlp
from raytrace_rl._env_otlp import endpoint, settings

P = "OTEL_EXPORTER_OTLP_"


def test_defaults_are_those_of_the_specification():
    """Catches a relay that sends elsewhere than to a collector on its own node."""
    found = endpoint("traces", {})
    assert (found.protocol, found.target, found.secure) == ("grpc", "localhost:4317", False)
    assert (found.compression, found.timeout_s, found.headers) == ("none", 10.0, ())


@pytest.mark.parametrize(
    ("url", "insecure", "target", "secure"),
    [
        ("http://collector:4317", "", "collector:4317", False),
        ("http://collector:4317/", "false", "collector:4317", False),
        ("https://collector:4317", "true", "collector:4317", True),
        ("collector:4317", "", "collector:4317", True),
        ("collector:4317", "true", "collector:4317", False),
        ("HTTPS://collector:4317/x/y", "", "collector:4317", True),
        ("unix:/run/otlp.sock", "", "unix:/run/otlp.sock", False),
        ("http://[::1]:4317", "", "[::1]:4317", False),
    ],
)
def test_grpc_endpoints(url, insecure, target, secure):
    """Catches TLS spoken to a plain port or the reverse, and a path taken for a part of the host."""
    found = endpoint("traces", {P + "ENDPOINT": url, P + "INSECURE": insecure})
    assert (found.target, found.secure) == (target, secure)


def test_http_endpoints_get_the_signals_path_unless_they_are_its_own():
    """Catches requests to the root of a collector, and a path appended to a path that was given in full."""
    environ = {
        P + "PROTOCOL": "http/protobuf",
        P + "ENDPOINT": "http://c:4318/base/",
        P + "LOGS_ENDPOINT": "http://l/in",
    }
    assert endpoint("traces", environ).url == "http://c:4318/base/v1/traces"
    assert endpoint("logs", environ).url == "http://l/in"
    assert endpoint("metrics", {P + "PROTOCOL": "http/protobuf"}).url == "http://localhost:4318/v1/metrics"


def test_a_signals_own_variables_stand_before_the_common_ones():
    """Catches a per-signal override that is ignored, or that reaches another signal."""
    environ = {
        P + "ENDPOINT": "http://all:4317",
        P + "TRACES_ENDPOINT": "http://traces:4317",
        P + "HEADERS": "a=1",
        P + "TRACES_HEADERS": "b=2",
        P + "TIMEOUT": "3000",
        P + "TRACES_TIMEOUT": "500",
        P + "COMPRESSION": "gzip",
        P + "TRACES_COMPRESSION": "none",
    }
    traces, metrics = endpoint("traces", environ), endpoint("metrics", environ)
    assert (traces.target, traces.headers, traces.timeout_s, traces.compression) == (
        "traces:4317",
        (("b", "2"),),
        0.5,
        "none",
    )
    assert (metrics.target, metrics.headers, metrics.timeout_s, metrics.compression) == (
        "all:4317",
        (("a", "1"),),
        3.0,
        "gzip",
    )


def test_headers_are_decoded():
    """Catches a key that reaches the collector with its percent signs, or in capitals (which gRPC refuses)."""
    found = endpoint("traces", {P + "HEADERS": "Api-Key=a%20b%3D, x = y ,empty="})
    assert found.headers == (("api-key", "a b="), ("x", "y"), ("empty", ""))


def test_unreadable_values_are_a_warning_and_the_default(caplog):
    """Catches a typing error that keeps a relay from starting."""
    environ = {P + "TIMEOUT": "soon", P + "COMPRESSION": "zip", P + "PROTOCOL": "thrift", P + "HEADERS": "s3cret"}
    found = endpoint("traces", environ)
    assert (found.timeout_s, found.compression, found.protocol, found.headers) == (10.0, "none", "grpc", ())
    for name in ("TIMEOUT", "COMPRESSION", "PROTOCOL", "HEADERS"):
        assert P + name in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_endpoint_that_is_no_url_is_a_warning_and_the_default(protocol, caplog):
    """Catches a bracket too few that switches all telemetry off."""
    found = endpoint("traces", {P + "PROTOCOL": protocol, P + "ENDPOINT": "http://me:s3cret@[::1"})
    assert "//localhost:431" in found.url
    assert P + "ENDPOINT" in caplog.text
    assert "s3cret" not in caplog.text


def test_certificates_travel_as_contents(tmp_path, caplog):
    """Catches a relay on another node that looks there for a file which only the driver has."""
    (tmp_path / "ca.pem").write_bytes(b"CA")
    found = endpoint("traces", {P + "CERTIFICATE": str(tmp_path / "ca.pem"), P + "CLIENT_KEY": str(tmp_path / "no")})
    assert (found.certificate, found.client_key) == (b"CA", None)
    assert P + "CLIENT_KEY" in caplog.text


def test_a_signal_can_be_switched_off():
    """Catches logs sent to a backend that does not take any, although the standard variable says so."""
    found = settings({"OTEL_LOGS_EXPORTER": "none"})
    assert found.endpoints["logs"] is None
    assert found.endpoints["traces"] is not None


def test_no_secret_is_in_a_representation():
    """Catches a header in a log line that prints the settings."""
    found = settings({P + "HEADERS": "key=s3cret", P + "ENDPOINT": "http://me:s3cret@host:4317"})
    assert "s3cret" not in repr(found)
    assert "s3cret" not in found.endpoints["traces"].url
    assert found.endpoints["traces"].target == "host:4317"
    assert _env_otlp.endpoint("traces", {P + "ENDPOINT": "u:s3cret@host:4317"}).url == "host:4317"
