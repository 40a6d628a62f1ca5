"""A data plane's operations as spans: what they say, in every kind of method, and that nothing else changes."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import pickle
import queue
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from opentelemetry import trace

from raytrace_rl import managed_span, setup
from raytrace_rl.instrumentation import per_prompt_scope
from raytrace_rl.integrations._payload import Payload, payload_of
from raytrace_rl.integrations.data_plane import traced_data_plane
from tests.running import Telemetry, attributes, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytest_plugins = ["tests.telemetry_fixtures"]


@dataclass
class Meta:
    """In the shape of NeMo-RL's ``KVBatchMeta``."""

    partition_id: str
    sample_ids: list[str]
    tags: list[dict[str, Any]] = field(default_factory=list)


class Client:
    """In the shapes of NeMo-RL's ``DataPlaneClient`` and TransferQueue's client."""

    retries = 3

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def put_samples(self, sample_ids: list[str], partition_id: str, fields: Any = None, *, tags: Any = None) -> Meta:
        self.kept.update(zip(sample_ids, fields["ids"], strict=True))
        return Meta(partition_id, sample_ids)

    def get_data(self, meta: Meta, select_fields: list[str] | None = None) -> dict[str, Any]:
        return {"ids": np.stack([self.kept[key] for key in meta.sample_ids])}

    def claim_meta(self, partition_id: str, task_name: str, batch_size: int) -> Meta:
        return Meta(partition_id, list(self.kept)[:batch_size])

    async def async_put(self, data: Any, metadata: Any = None, partition_id: str | None = None) -> Any:
        await asyncio.sleep(0)
        with managed_span("reward", "inside"):
            return data

    def stream(self, partition_id: str) -> Iterator[int]:
        yield 1
        yield 2

    async def astream(self, partition_id: str) -> AsyncIterator[int]:
        yield 1
        yield 2

    def fail(self, partition_id: str, error: BaseException) -> None:
        raise error

    def later(self, value: Any) -> Any:
        return value

    def _private(self) -> str:
        return "private"

    def __len__(self) -> int:
        return len(self.kept)

    def __contains__(self, key: str) -> bool:
        return key in self.kept

    def __enter__(self) -> Client:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(self, *exc: object) -> None: ...


@pytest.fixture
def client() -> Any:
    """A traced view of a client."""
    return traced_data_plane(Client())


def said(telemetry: Telemetry, operation: str) -> dict[str, Any]:
    """The attributes of the one span of that operation, without what every span has."""
    found = attributes(telemetry.span(f"rl.data_plane.{operation}"))
    return {key.removeprefix("rl.data_plane."): value for key, value in found.items() if "data_plane." in key}


def test_an_operation_says_where_and_what_and_how_much(telemetry, client):
    """Catches a span without partition, keys, bytes or status; and bytes counted on one side alone."""
    tokens = np.zeros((2, 4), dtype=np.int64)
    meta = client.put_samples(["a", "b"], "rollout", fields={"ids": tokens}, tags=[{"std": 0.5}])
    assert client.claim_meta("rollout", "train", 2) == meta
    assert client.get_data(meta, select_fields=["ids"])["ids"].shape == (2, 4)
    assert said(telemetry, "put_samples") == {"partition": "rollout", "num_keys": 2, "num_bytes": 64, "status": "ok"}
    assert said(telemetry, "claim_meta") == {"partition": "rollout", "num_keys": 2, "num_bytes": 5, "status": "ok"}
    assert said(telemetry, "get_data") == {"partition": "rollout", "num_keys": 2, "num_bytes": 67, "status": "ok"}
    found = attributes(telemetry.span("rl.data_plane.put_samples"))
    assert (found["rl.span_group"], found["rl.bucket"]) == ("data_plane", "overhead")


def test_inside_a_prompts_scope_it_is_per_prompt(tmp_path, client):
    """Catches a span for every prompt in a run that asked for steps, and overlapping ones that count as overhead."""
    with running(tmp_path / "all") as telemetry:
        with per_prompt_scope():
            client.later(7)
        found = attributes(telemetry.span("rl.data_plane.later"))
        assert found["rl.span_group"] == "per_prompt"
        assert "rl.bucket" not in found
    with running(tmp_path / "step", span_groups="per_step") as telemetry:
        with per_prompt_scope():
            assert client.later(7) == 7
        client.later(8)
        assert len([span for span in telemetry.spans() if span.name == "rl.data_plane.later"]) == 1


def test_a_coroutine_is_one_span_around_what_it_awaits(telemetry, client):
    """Catches a span that ends when the coroutine is made."""
    assert asyncio.run(client.async_put(np.zeros(3, dtype=np.int8), partition_id="p")) is not None
    span = telemetry.span("rl.data_plane.put")
    assert telemetry.span("inside").parent_span_id == span.span_id
    assert said(telemetry, "put")["num_bytes"] == 3, "the same array came back: it is one payload"


def test_a_stream_is_one_span_from_its_first_step_to_its_end(telemetry, client):
    """Catches a stream whose span ends before the first item, or never."""
    steps = client.stream("p")
    assert next(steps) == 1
    assert not [span for span in telemetry.spans() if span.name == "rl.data_plane.stream"]
    assert list(steps) == [2]

    async def read() -> list[int]:
        return [item async for item in client.astream("p")]

    assert asyncio.run(read()) == [1, 2]
    assert said(telemetry, "stream") == said(telemetry, "astream") == {"partition": "p", "status": "ok"}


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("bad"), "error"), (TimeoutError("late"), "timeout"), (asyncio.CancelledError(), "cancelled")],
)
def test_how_it_ended(error, status, telemetry, client):
    """Catches a failure that is swallowed, or looks like any other."""
    with pytest.raises(type(error)) as caught:
        client.fail("p", error)
    assert caught.value is error
    assert said(telemetry, "fail") == {"partition": "p", "status": status}


def test_what_is_yet_to_be_waited_for_is_submitted(telemetry, client):
    """Catches "ok" on an operation that has not happened, and a future that is not the client's own."""
    future: Future[int] = Future()
    assert client.later(future) is future
    assert said(telemetry, "later")["status"] == "submitted"


def test_nothing_but_the_spans_changes(telemetry, client):
    """Catches a view that does not pass for its client."""
    assert isinstance(client, Client)
    with client as entered:
        entered.put_samples(["a"], "p", {"ids": np.zeros((1, 1))})
    assert telemetry.span("rl.data_plane.put_samples"), "what ``with`` gives is the view"
    assert (len(client), "a" in client, "b" in client, bool(client)) == (1, True, False, True)
    assert client.retries == 3
    client.retries = 4
    plain = pickle.loads(pickle.dumps(client))
    assert type(plain) is Client
    assert plain.retries == 4
    assert client._private() == "private"
    assert {client: 1}[client] == 1
    assert client.put_samples.__name__ == "put_samples"
    assert asyncio.iscoroutinefunction(client.async_put)
    assert "put_samples" in dir(client)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = client.nothing_of_the_kind
    with pytest.raises(TypeError):
        len(traced_data_plane(object()))
    assert [span.name for span in telemetry.spans()] == ["rl.data_plane.put_samples"]


def test_only_the_named_methods_are_operations(telemetry):
    """Catches a span for every look at a size in a polling loop."""
    client = traced_data_plane(Client(), operations=["claim_meta"])
    client.later(1)
    client.claim_meta("p", "t", 1)
    assert [span.name for span in telemetry.spans()] == ["rl.data_plane.claim_meta"]


def test_a_view_of_a_view_is_one(telemetry, client):
    """Catches each operation twice, where a factory and its caller both trace."""
    assert traced_data_plane(client) is client
    client.later(1)
    assert len(telemetry.spans()) == 1


def test_a_module_of_functions_is_a_client_too(telemetry):
    """Catches TransferQueue's own interface, which is one."""
    module = types.ModuleType("transfer_queue")
    module.kv_put = lambda key, partition_id, fields: key
    assert traced_data_plane(module).kv_put("k", "p", np.zeros(5, dtype=np.int8)) == "k"
    assert said(telemetry, "kv_put") == {"partition": "p", "num_keys": 1, "num_bytes": 6, "status": "ok"}


def test_transfer_queues_metadata_names_its_partitions(telemetry, client):
    """Catches a batch of TransferQueue's, which names one partition a sample."""
    batch = types.SimpleNamespace(partition_ids=["p", "p"], global_indexes=[4, 5], size=2)
    client.later(batch)
    assert said(telemetry, "later") == {"partition": "p", "num_keys": 2, "num_bytes": 0, "status": "ok"}


def test_off_it_is_all_as_if_we_were_not_there(client, monkeypatch):
    """Catches a look at the user's data while nothing is recorded."""
    monkeypatch.setattr("raytrace_rl.integrations._operations.of_call", lambda *args: pytest.fail("looked"))
    assert client.later(7) == 7
    setup.init_telemetry_driver({"enabled": True, "exporter": "none", "span_groups": "job"})
    assert client.later(7) == 7
    assert asyncio.run(client.async_put(7)) == 7
    assert list(client.stream("p")) == [1, 2]


class Hostile:
    """Whatever is asked of it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def test_an_argument_that_cannot_be_looked_at_costs_attributes_alone(telemetry, client, caplog):
    """Catches an object of the user's that ends the operation because we looked at it."""
    hostile = Hostile()
    for _ in range(2):
        assert client.later(hostile) is hostile
    spans = [span for span in telemetry.spans() if span.name == "rl.data_plane.later"]
    assert len(spans) == 2
    assert len([record for record in caplog.records if record.name == "raytrace_rl"]) == 1


class NoAttributes:
    """A payload whose ``__getattr__`` fails in its own way; what is looked up on its class does not."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class NoText:
    def __str__(self) -> str:
        raise LookupError("no text")


class NoLength:
    def __len__(self) -> int:
        raise LookupError("no length")


def test_an_argument_that_fails_costs_what_it_would_say_itself(telemetry):
    """Catches a payload, or one broken argument, that takes partition, keys and bytes of all others along."""

    class Store:
        def put(self, data: Any, keys: Any = None, partition_id: Any = None) -> Any:
            return NoAttributes()

    store = traced_data_plane(Store())
    said_of = []
    for data, keys, partition in (
        (NoAttributes(), ["a", "b"], "p"),
        (np.zeros(5, dtype=np.int8), NoLength(), "p"),
        (np.zeros(5, dtype=np.int8), ["a"], NoText()),
        (Meta("p", ["a"]), None, None),
    ):
        store.put(data, keys=keys, partition_id=partition)
        span = [row for row in telemetry.spans() if row.name == "rl.data_plane.put"][-1]
        found = attributes(span)
        said_of.append([found.get(f"rl.data_plane.{key}") for key in ("partition", "num_keys", "num_bytes")])
    assert said_of == [["p", 2, 0], ["p", None, 5], [None, 1, 5], ["p", 1, 0]]


def test_a_payload_is_not_asked_for_attributes_that_it_has_not(telemetry, client):
    """Catches a lazy object that is loaded because we looked for a partition in it."""
    asked: list[str] = []

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return [1]

    client.later(Lazy())
    assert telemetry.span("rl.data_plane.later")
    assert [name for name in asked if not name.startswith("__")] == []


class Ring(list[Any]):
    """A replay buffer that is a container, with operators."""

    def push(self, item: Any) -> None:
        self.append(item)

    def __lt__(self, other: Any) -> bool:
        return len(self) < len(other)

    def __add__(self, other: Any) -> Any:
        return Ring([*self, *other])

    def __radd__(self, other: Any) -> Any:
        return Ring([*other, *self])

    def __neg__(self) -> str:
        return "negative"

    def __index__(self) -> int:
        return len(self)

    def __str__(self) -> str:
        return "ring"

    def __matmul__(self, other: Any) -> Any:
        return type(other).__mro__[0]


def test_operators_are_the_clients(telemetry):
    """Catches an operation that works on the client and not on its view."""
    plain = Ring([1, 2])
    view: Any = traced_data_plane(plain)
    other: Any = traced_data_plane(Ring([3]))
    assert (view < other, other < view, view > other, view >= [1, 2], view != other) == (False, True, False, True, True)
    assert view + [3] == [*view, 3] == [1, 2, 3]  # noqa: RUF005 - the operator is what is tested
    assert [0] + view == [0, 1, 2]  # noqa: RUF005
    assert view + other == [1, 2, 3]
    assert view @ other is Ring, "the other operand is the client as well"
    assert list(reversed(view)) == [2, 1]
    assert ([9, 8, 7][view], -view, str(view), f"{view}") == (7, "negative", "ring", "ring")
    before = view
    view += [3]
    assert view is before, "what works in place gives the view back"
    assert plain == [1, 2, 3]
    copied = copy.copy(view)
    assert copied == plain
    assert copied is not plain
    with pytest.raises(TypeError):
        _ = traced_data_plane(Client()) < traced_data_plane(Client())  # type: ignore[operator]
    with pytest.raises(TypeError):
        reversed(traced_data_plane(object()))  # type: ignore[call-overload]
    view.push(4)
    assert [span.name for span in telemetry.spans()] == ["rl.data_plane.push"]


def _builtin_method() -> Any:
    class Queue(queue.SimpleQueue[Any]):
        pass

    return Queue()


def _closure() -> Any:
    class Client:
        put: Any

    client = Client()
    client.put = lambda item, own=client: None
    return client


def _dynamic_class() -> Any:
    class Store:
        def put(self, item: Any) -> None: ...

    return Store()


def _partial() -> Any:
    client = _dynamic_class()
    client.put = functools.partial(type(client).put, client)
    return client


@pytest.mark.parametrize("make", [_builtin_method, _closure, _dynamic_class, _partial])
def test_a_client_is_not_kept_alive(make, telemetry):
    """Catches a cache that holds clients, or classes, and the buffers behind them for ever."""
    client = make()
    gone = [weakref.ref(client), weakref.ref(type(client))]
    traced_data_plane(client).put(bytes(10))
    assert said(telemetry, "put")["num_bytes"] == 10
    del client
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_span_is_current_inside(telemetry):
    """Catches spans of the client's own, or of its RPC library, that hang beside the operation."""

    class Inner:
        def put(self) -> Any:
            return trace.get_current_span().get_span_context().span_id

    inside = traced_data_plane(Inner()).put()
    assert telemetry.span("rl.data_plane.put").span_id == inside.to_bytes(8, "big")


# --------------------------------------------------------------------------------------------------------------- bytes


@dataclass
class Batch:
    """A user's own."""

    tokens: Any
    rewards: Any


ARRAY = np.zeros((2, 3), dtype=np.float32)
TENSOR = torch.zeros((2, 3), dtype=torch.bfloat16)
NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("value", "num_bytes", "complete"),
    [
        (ARRAY, 24, True),
        (TENSOR, 12, True),
        (TENSOR[:1], 6, True),
        (NESTED, 28, True),
        (np.float32(1), 4, True),
        (b"12345", 5, True),
        (bytearray(3), 3, True),
        (memoryview(bytes(7)), 7, True),
        ("abc", 3, True),
        ("aé", 2, False),
        ({"ids": ARRAY, "more": {"mask": TENSOR}}, 36, True),
        (UserDict({"ids": ARRAY}), 24, True),
        ([ARRAY, ARRAY.copy()], 48, True),
        ([ARRAY, ARRAY], 24, True),
        (deque([TENSOR]), 12, True),
        (Batch(ARRAY, TENSOR), 36, True),
        ([{"role": "user", "said": "hello"}], 9, True),
        (None, 0, True),
        (7, 0, True),
        ([1, 2, 3], 0, True),
        ([1.5] * 65, 0, False),
        (["tell me", "why"], 10, True),
        ([], 0, True),
        (object(), 0, False),
        (np.array([object()], dtype=object), 0, False),
        (torch.eye(3).to_sparse(), 0, False),
        ([ARRAY.copy() for _ in range(2000)], None, False),
    ],
    ids=repr,
)
def test_payload(value, num_bytes, complete):
    """Catches a number that is made up: what cannot be told cheaply makes it a lower bound that says so."""
    found = payload_of([value])
    assert found.complete is complete
    assert num_bytes is None or found.num_bytes == num_bytes


class Loading:
    """What a container that loads from a disk when it is asked is made of."""

    def values(self) -> Any:
        pytest.fail("loaded")

    def __getitem__(self, key: Any) -> Any:
        pytest.fail("loaded")

    def __iter__(self) -> Any:
        pytest.fail("loaded")

    def __len__(self) -> int:
        raise AssertionError("loaded")

    def keys(self) -> Any:
        pytest.fail("loaded")


class LazyDict(Loading, dict[str, Any]): ...


class LazyList(Loading, list[Any]): ...


class LazyUserDict(Loading, UserDict[str, Any]): ...


class LazyMapping(Loading, Mapping[str, Any]): ...


@dataclass
class LazyField:
    """A field that a property stands for."""

    kept: Any
    loaded: Any = None


LazyField.loaded = property(lambda self: pytest.fail("loaded"), lambda self, value: None)


@dataclass(slots=True)
class Slotted:
    ids: Any


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (LazyDict(a=b"123"), Payload(3, complete=False)),
        (LazyList([b"123"]), Payload(3, complete=False)),
        (LazyUserDict(), Payload(0, complete=False)),
        (LazyMapping(), Payload(0, complete=False)),
        (Loading(), Payload(0, complete=False)),
        (LazyField(b"123"), Payload(3, complete=False)),
        (OrderedDict(a=b"123"), Payload(3, complete=True)),
        (defaultdict(list, a=b"123"), Payload(3, complete=True)),
        (Slotted(b"123"), Payload(3, complete=True)),
        (torch.Size([1, 2]), Payload(0, complete=True)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_is_looked_into_and_never_asked(value, found):
    """Catches a lazy mapping that is loaded, or walked without end, so that its bytes can be counted."""
    assert payload_of([value]) == found


def test_a_circle_has_an_end():
    """Catches a batch that holds itself."""
    circle: list[Any] = [ARRAY]
    circle.append(circle)
    assert payload_of([circle]) == Payload(24, complete=True)


def test_a_tensordict_is_walked_without_its_package():
    """Catches NeMo-RL's and verl's batches, which are no mappings."""

    class TensorDict:
        def keys(self) -> list[str]:
            return ["ids"]

        def values(self) -> list[Any]:
            return [TENSOR, ARRAY]

    assert payload_of([TensorDict()]) == Payload(36, complete=True)


def test_a_partial_count_says_so(telemetry, client):
    """Catches a lower bound that passes for the whole."""
    client.later({"ids": ARRAY, "turns": list(range(1000))})
    assert said(telemetry, "later") == {"num_bytes": 24, "bytes_partial": True, "status": "ok"}
