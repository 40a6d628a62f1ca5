"""What the fuzzer begins with: the golden files, what a real writer leaves, and what goes over the wire."""

from __future__ import annotations

import gzip
import io
import json
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrace_rl.monitor import export, load_run
from raytrace_rl.relay import requests
from raytrace_rl.relay.batch import Portion
from raytrace_rl.spool.format import Kind
from raytrace_rl.spool.reader import Cursor
from tests.fuzz import bulk_targets

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
GOLDEN = _HERE.parent / "golden"
REGRESSIONS = _HERE / "regressions"
#: Zeros that stay behind what a writer allocated ahead: enough to be met.
_ZEROS = 64
_CARRIERS = (
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "raytrace": "i=7;b=overhead;p=1"},
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "tracestate": "a=1,b=2"},
    {"traceparent": "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-later", "raytrace": "w=3|1,node-3"},
    {"baggage": "user=me,team=%20x;meta=1", "raytrace": "p=m|1760000000000000000,node-3"},
)


def seeds() -> dict[str, dict[str, bytes]]:
    """Returns the first inputs of each target, by name."""
    found: dict[str, dict[str, bytes]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as directory:
        files = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
        payloads: dict[int, list[bytes]] = defaultdict(list)
        for end in ("close", "kill"):
            run_dir = Path(directory) / end
            command = [sys.executable, "-m", "tests.fuzz.writing", str(run_dir), end]
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == (0 if end == "close" else -9), done.stderr
            _add_run(found, files, payloads, run_dir, end)
    for name, data in files.items():
        for flags in range(8):
            found["segment"][f"{name}-{flags}"] = bytes((flags, 80, 160, 3)) + data
        for n, at in enumerate((64, 100, len(data) // 2)):
            found["segment_long"][f"{name}-{n}"] = bytes((n & 1, at & 255, at >> 8, 20)) + data
        for flags in range(4):
            found["sealed"][f"{name}-{flags}"] = bytes((flags, 0, 0, 0)) + data
    _add_messages(found, payloads)
    for target, of_target in bulk_targets.seeds(files, payloads).items():
        found[target].update(of_target)
    for n, one in enumerate(_CARRIERS):
        keys = ("traceparent", "tracestate", "raytrace", "baggage")
        lines = [bytes((keys.index(key), 0)) + value.encode() for key, value in one.items()]
        found["carrier"][str(n)] = b"\1" + b"\n".join(lines)
    _add_notes(found)
    for of_target in found.values():
        of_target["empty"] = b""
    return found


def _add_run(
    found: dict[str, dict[str, bytes]], files: dict[str, bytes], payloads: dict[int, list[bytes]], run: Path, end: str
) -> None:
    parts: dict[str, bytes] = {"segment": b"", "journal": b"", "table": b""}
    for path in sorted((run / "spool").glob("*/*")):
        if path.suffix not in {".rts", ".open"}:
            continue
        used = path.read_bytes().rstrip(b"\0")
        data = used + bytes(_ZEROS)
        kind = "table" if path.suffix == ".open" else "journal" if ".open." in path.name else "segment"
        parts[kind] = data
        files[f"{end}-{kind}"] = data
        if path.suffix == ".rts":
            with Cursor(path) as cursor:
                for record in cursor.poll():
                    payloads[record.kind].append(record.payload)
                assert cursor.header is not None
                payloads[Kind.RESOURCE].append(cursor.header.resource)
    for flags in range(4):
        body = b"".join(len(parts[kind]).to_bytes(2, "little") + parts[kind] for kind in ("segment", "journal"))
        found["process"][f"{end}-{flags}"] = bytes((flags,)) + body + parts["table"]
    loaded = load_run(run)
    for form in export.OTLP_FORMATS:
        out = io.BytesIO()
        export.export(loaded, form, out)
        found["otlp_file"][f"{end}-{form}"] = out.getvalue()
        if form == "otlp-json" and end == "kill":
            first = json.loads(out.getvalue().splitlines()[0])
            spans = first["resourceSpans"][0]["scopeSpans"][0]["spans"]
            spans[:] = [next(one for one in spans if one["name"] == "rl.vllm.generate")]
            for n, odd in enumerate(_with_odd_leaves(first)):
                found["otlp_file"][f"odd-{n}"] = json.dumps(odd).encode() + b"\n"


def _add_messages(found: dict[str, dict[str, bytes]], payloads: dict[int, list[bytes]]) -> None:
    resource = payloads[Kind.RESOURCE][0]
    found["decode"]["resource"] = b"\3" + resource
    kinds = ((Kind.SPAN, 0), (Kind.OPEN_SPAN, 0), (Kind.SCOPE_SPANS, 1), (Kind.METRICS, 5), (Kind.LOGS, 6))
    for kind, selector in kinds:
        assert payloads[kind], f"a writer that leaves records of kind {kind}"
        for n, payload in enumerate(payloads[kind]):
            found["decode"][f"{kind.name}-{n}"] = bytes((selector,)) + payload
    found["decode_long"] = dict(found["decode"])
    for n, signal in enumerate(requests.SIGNALS.values()):
        taken = {kind: payloads[kind] for kind in signal.kinds}
        request = requests.request(signal, [Portion("7-8", resource, taken)])
        found["intake"][signal.name] = bytes((n,)) + request
        if signal.name == "traces":
            found["decode"]["request"] = b"\2" + request
        head = f"POST {signal.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n"
        head += "Content-Type: application/x-protobuf\r\n"
        for encoding, body in (("identity", request), ("gzip", gzip.compress(request, mtime=0))):
            about = f"Content-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
            found["http"][f"{signal.name}-{encoding}"] = (head + about).encode() + body
        found["http"][f"{signal.name}-length"] = f"{head}Content-Length: {'9' * 5000}\r\n\r\n".encode()


def _add_notes(found: dict[str, dict[str, bytes]]) -> None:
    control = {"schema": 1, "span_groups": "per_step", "until_ns": None, "written_ns": 1}
    place = {"below": 2, "at": {"3": 4096}, "done": [4], "truncated": 1}
    noted = {
        "version": 1,
        "destination": "there",
        "processes": {"7-8": place},
        "finished": ["5-6"],
        "tally": {"sent": 5},
    }
    sections = {"freed": {"counts": {"spans": 3}, "now": {}}, "carried": {"counts": {"bytes": 9}, "now": {"behind": 1}}}
    counts = {"version": 2, "pid": 7, "updated_ns": 1, "sections": sections, "freeing": {"7-8.0.rts": [5, 600]}}
    for n, one in enumerate((control, noted, counts)):
        for m, variant in enumerate([one, *_with_odd_leaves(one)]):
            found["notes"][f"{n}-{m}"] = bytes((n,)) + json.dumps(variant).encode()
        found["notes"][f"{n}-deep"] = bytes((n,)) + b"[" * 50_000


def _with_odd_leaves(value: Any) -> Iterator[Any]:
    """Yields JSON values in which one part is something else."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: odd} for odd in _with_odd_leaves(inner))
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from ([*value[:n], odd, *value[n + 1 :]] for odd in _with_odd_leaves(inner))
    yield from (None, True, -1, 10**400, math.inf, "text", [], {}, ["x"], {"x": "y"})


def regressions() -> dict[str, dict[str, bytes]]:
    """Returns the inputs, by target and name, on which a property once did not hold."""
    return {
        directory.name: {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
        for directory in sorted(REGRESSIONS.iterdir())
    }
