"""The Perfetto export, read with the official classes as the viewer reads it: by time, a stack a track."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from raytrace_rl.monitor.export import export
from raytrace_rl.monitor.tracks import depths, tracks
from tests.made_runs import Made
from tests.spooling import SECOND, T0


def _trace(made: Made) -> Any:
    out = io.BytesIO()
    run = made.run()
    assert export(run, "perfetto", out) == len(run.spans)
    return Trace.FromString(out.getvalue())


class Viewer:
    """What ui.perfetto.dev makes of a trace: packets by time, equal ones in their order, a stack of slices a track."""

    def __init__(self, trace: Any) -> None:
        self.tracks: dict[int, Any] = {}
        #: Name, start, end (None: open), depth and track of each slice.
        self.slices: list[tuple[str, int, int | None, int, int]] = []
        self.instants: list[tuple[str, int, int]] = []
        self.annotations: dict[str, dict[str, Any]] = {}
        self.categories: dict[str, set[str]] = {}
        self.flows: dict[str, tuple[set[int], set[int]]] = {}
        names: dict[str, dict[int, str]] = defaultdict(dict)
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            for field in ("event_names", "event_categories", "debug_annotation_names"):
                for entry in getattr(packet.interned_data, field):
                    names[field][entry.iid] = entry.name
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        events = [packet for packet in trace.packet if packet.HasField("track_event")]
        stacks: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for packet in sorted(events, key=lambda packet: packet.timestamp):
            event = packet.track_event
            assert event.track_uuid in self.tracks
            stack = stacks[event.track_uuid]
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                name = names["event_names"][event.name_iid]
                stack.append((name, packet.timestamp))
                self.categories[name] = {names["event_categories"][iid] for iid in event.category_iids}
                self.annotations[name] = {
                    names["debug_annotation_names"][one.name_iid]: getattr(one, one.WhichOneof("value"))
                    for one in event.debug_annotations
                }
                self.flows[name] = set(event.flow_ids), set(event.terminating_flow_ids)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                name, start = stack.pop()
                self.slices.append((name, start, packet.timestamp, len(stack), event.track_uuid))
            else:
                self.instants.append((event.name, packet.timestamp, event.track_uuid))
        for uuid, stack in stacks.items():
            self.slices += [(name, start, None, depth, uuid) for depth, (name, start) in enumerate(stack)]

    def thread(self, uuid: int) -> str:
        """Name of a track."""
        track = self.tracks[uuid]
        return str(track.thread.thread_name or track.name)


def _s(time_ns: int | None) -> float | None:
    return None if time_ns is None else (time_ns - T0) / SECOND


def test_spans_are_slices_on_the_tracks_of_their_threads():
    """Catches slices on the wrong process, with the wrong times, or without what is known of them."""
    made = Made()
    step = made.step(0, 10)
    worker = made.rank(1, "generation", "node-b")
    made.span(worker, "generate", 2, 9, step, group="generation", bucket="productive", tokens=7, error=True)
    viewer = Viewer(_trace(made))
    assert [(name, _s(start), _s(end), depth) for name, start, end, depth, _ in sorted(viewer.slices)] == [
        ("generate", 2, 9, 0),
        ("step", 0, 10, 0),
    ]
    processes = {track.process.pid: track.name for track in viewer.tracks.values() if track.HasField("process")}
    assert sorted(processes.values()) == ["driver pid 100 on node-a", "generation[1] pid 101 on node-b"]
    assert viewer.categories["generate"] == {"productive", "generation"}
    about = viewer.annotations["generate"]
    assert (about["tokens"], about["status"], about["status_message"]) == (7, "ERROR", "it broke")


def test_equal_pids_of_two_nodes_stay_two_processes():
    """Catches two workers drawn as one, because their nodes gave them the same pid."""
    made = Made()
    for rank in (0, 1):
        worker = made.rank(rank, node=f"node-{rank}")
        worker.pid = 77
        made.span(worker, "work", 0, 5)
    viewer = Viewer(_trace(made))
    pids = [track.process.pid for track in viewer.tracks.values() if track.HasField("process")]
    assert len(set(pids)) == len(pids)


def test_arrows_lead_to_children_in_other_processes():
    """Catches a call across processes that cannot be followed in the viewer."""
    made = Made()
    step = made.step(0, 10)
    made.span(made.driver, "own", 1, 2, step)
    made.span(made.rank(0), "remote", 2, 9, step)
    viewer = Viewer(_trace(made))
    (flow,) = viewer.flows["step"][0]
    assert viewer.flows["remote"] == (set(), {flow})
    assert viewer.flows["own"] == (set(), set())


def test_overlapping_tasks_get_tracks_of_their_own():
    """Catches tasks of one event loop drawn inside each other, or one cutting the other off."""
    made = Made()
    made.span(made.driver, "a", 0, 4, thread__name="loop")
    made.span(made.driver, "b", 2, 6, thread__name="loop")
    made.span(made.driver, "c", 4, 8, thread__name="loop")
    viewer = Viewer(_trace(made))
    found = {name: (viewer.thread(uuid), _s(start), _s(end)) for name, start, end, _, uuid in viewer.slices}
    assert found == {"a": ("loop", 0, 4), "b": ("loop (overlapping)", 2, 6), "c": ("loop", 4, 8)}
    (other,) = [track for track in viewer.tracks.values() if track.name == "loop (overlapping)"]
    assert viewer.tracks[other.parent_uuid].thread.thread_name == "loop"


def test_threads_that_share_an_id_one_after_the_other_share_a_name():
    """Catches the track of a thousand rollouts that bears the name of the first."""
    made = Made()
    for n in range(3):
        made.span(made.driver, f"rollout {n}", n, n + 1, thread__name=f"rollout-{n}")
    (track,) = tracks(made.run().spans)
    assert track.name == "rollout-*"


def test_open_span_has_no_end():
    """Catches a span that is still open drawn as if it had ended."""
    made = Made()
    step = made.step(0, None)
    made.span(made.driver, "done", 1, 2, step)
    viewer = Viewer(_trace(made))
    assert {(name, _s(end), depth) for name, _, end, depth, _ in viewer.slices} == {("step", None, 0), ("done", 2, 1)}


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)), st.integers(1, 2), st.integers(0, 20)),
        max_size=20,
    )
)
def test_no_slice_is_ever_cut_off_or_misplaced(drawn):
    """Catches two spans on one track that overlap without nesting: the viewer would end the wrong one."""
    made = Made()
    for n, (start, length, thread, parent) in enumerate(drawn):
        above = made.rows[parent % n] if n else None
        end = None if length is None else start + length
        made.span(made.driver, f"s{n}", start, end, above, thread=thread)
    viewer = Viewer(_trace(made))
    assert {(name, _s(start), _s(end)) for name, start, end, _, _ in viewer.slices} == {
        (f"s{n}", start, None if length is None else start + length) for n, (start, length, _, _) in enumerate(drawn)
    }
    laid = tracks(made.rows)
    assert sorted(id(row) for track in laid for row in track.rows) == sorted(map(id, made.rows))
    shown = {name: depth for name, _, _, depth, _ in viewer.slices}
    assert shown == {row.name: depth for track in laid for row, depth in zip(track.rows, depths(track), strict=True)}
