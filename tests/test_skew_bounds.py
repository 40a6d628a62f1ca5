"""Skew from messages alone: planted clocks are always within their bounds, and what cannot be true is said."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from raytrace_rl.monitor.skew_bounds import Message, solve
from tests.spooling import SECOND

_NODES = "abcdef"
_SKEWS = st.integers(-10 * SECOND, 10 * SECOND)
_DELAYS = st.integers(0, SECOND)


@st.composite
def planted(draw: st.DrawFn) -> tuple[dict[str, int], list[Message]]:
    """Nodes with a skew each, and messages between some of them that take whatever time they take."""
    skews = {node: draw(_SKEWS) for node in _NODES[: draw(st.integers(2, 6))]}
    pairs = st.sampled_from(list(permutations(skews, 2)))
    sent = draw(st.lists(st.tuples(pairs, _DELAYS), max_size=40))
    return skews, [Message(a, b, took + skews[b] - skews[a]) for (a, b), took in sent]


@given(planted())
def test_the_true_skew_is_always_within_its_bounds(made):
    """Catches a bound that is not one: a delay taken for symmetric, an average, a side that is mixed up."""
    skews, sent = made
    solution = solve(iter(sent), "a", skews)
    assert solution.contradictions == []
    for node, interval in solution.intervals.items():
        true = skews[node] - skews["a"]
        assert interval.lower_ns is None or interval.lower_ns <= true
        assert interval.upper_ns is None or true <= interval.upper_ns
        assert interval.messages == sum(node in (one.sender, one.receiver) for one in sent)
    assert (solution.intervals["a"].lower_ns, solution.intervals["a"].upper_ns) == (0, 0)


@given(planted())
def test_no_tighter_bound_follows_from_the_messages(made):
    """Catches bounds that stop at direct messages: a to b and b to c say something of a and c."""
    skews, sent = made
    distance: dict[tuple[str, str], float] = {(a, b): float("inf") for a in skews for b in skews}
    for one in sent:
        distance[one.sender, one.receiver] = min(distance[one.sender, one.receiver], one.delay_ns)
    for node in skews:
        distance[node, node] = 0
    for by in skews:  # Floyd and Warshall's: all pairs, slowly
        for a in skews:
            for b in skews:
                distance[a, b] = min(distance[a, b], distance[a, by] + distance[by, b])
    for node, interval in solve(sent, "a", skews).intervals.items():
        assert (float("inf") if interval.upper_ns is None else interval.upper_ns) == distance["a", node]
        assert (float("-inf") if interval.lower_ns is None else interval.lower_ns) == -distance[node, "a"]


@given(planted(), st.data())
def test_what_cannot_be_true_is_said_and_what_it_concerns_has_no_bounds(made, data):
    """Catches clocks that moved and whose bounds are averaged, or that cost others theirs that are not at fault."""
    skews, sent = made
    moved = data.draw(st.sampled_from(sorted(skews)))
    by_ns = data.draw(st.integers(1, 20 * SECOND))
    after = data.draw(st.lists(st.tuples(st.sampled_from(list(permutations(skews, 2))), _DELAYS), max_size=40))
    later = {**skews, moved: skews[moved] + by_ns}
    sent = [*sent, *(Message(a, b, took + later[b] - later[a]) for (a, b), took in after)]
    solution = solve(sent, "a", skews)
    others = [one for one in sent if moved not in (one.sender, one.receiver)]
    for one in solution.contradictions:
        assert moved in one.nodes, "clocks that agree contradict each other"
        assert 0 < one.moved_ns <= by_ns
    unspoilt = solve(others, "a", skews)
    blamed = {node for node, interval in solution.intervals.items() if interval.contradiction is not None}
    for node, interval in solution.intervals.items():
        if interval.contradiction is not None:
            assert node != "a"
            assert node in interval.contradiction.nodes
            assert (interval.lower_ns, interval.upper_ns) == (None, None)
        elif blamed <= {moved} and moved != node:
            known = unspoilt.intervals[node].upper_ns
            assert known is None or (interval.upper_ns is not None and interval.upper_ns <= known)


def test_a_node_that_contradicts_several_others_is_the_one_that_moved():
    """Catches a whole run without bounds because one node's clock was set."""
    quiet = [Message(a, b, 1) for a, b in permutations("acd", 2)]
    moved = [Message("b", node, -5) for node in "acd"] + [Message(node, "b", 3) for node in "acd"]
    found = solve([*quiet, *moved], "a")
    assert {node for node, interval in found.intervals.items() if interval.contradiction} == {"b"}
    assert [(one.nodes, one.moved_ns) for one in found.contradictions] == [
        (("a", "b"), 2),
        (("b", "c"), 2),
        (("b", "d"), 2),
    ]
    assert (found.intervals["c"].lower_ns, found.intervals["c"].upper_ns) == (-1, 1)


def test_a_contradiction_round_three_nodes():
    """Catches one that no two nodes show between themselves."""
    found = solve([Message("a", "b", 1), Message("b", "c", 1), Message("c", "a", -5)], "a")
    assert [(one.nodes, one.moved_ns) for one in found.contradictions] == [(("a", "b", "c"), 3)]
    assert found.intervals["b"].upper_ns is None
    assert found.intervals["c"].upper_ns is None


def test_many_nodes_in_a_line():
    """Catches an answer that takes the cube of the number of nodes."""
    nodes = [f"n{number}" for number in range(2000)]
    sent = [Message(a, b, 1) for a, b in pairwise(nodes)] + [Message(b, a, 1) for a, b in pairwise(nodes)]
    last = solve(sent, "n0").intervals["n1999"]
    assert (last.lower_ns, last.upper_ns) == (-1999, 1999)
