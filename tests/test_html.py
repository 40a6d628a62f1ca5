"""The HTML report: whole in one file, harmless whatever the run is called, and alive in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrace_rl import cli
from raytrace_rl.monitor.html_report import html
from raytrace_rl.monitor.timeline import BUDGET
from raytrace_rl.monitor.windows import Windows, stretch
from tests.chromium import EXECUTABLE, Page, chromium
from tests.made_runs import Made, data_parallel
from tests.spooling import SECOND, Spool, ended, resource, span

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">{{DATA}}<!-- & ' \u2028 \u202e"

browser_only = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here: apt-get install chromium")


def _large(lanes: int, spans: int, name: str = "work") -> Made:
    """A run of so many ranks, each with as many spans, in eight steps."""
    made = Made()
    ranks = [made.rank(rank, node=f"node-{rank // 8:03}") for rank in range(lanes)]
    each = spans // 8
    for number in range(8):
        begin = 100.0 * number
        step = made.step(begin, begin + 90)
        for rank, process in enumerate(ranks):
            length = 80 / each
            for n in range(each):
                at = begin + n * length
                made.span(process, f"{name} {n % 4}", at, at + length * 0.9, step, bucket="productive", thread=rank)
    return made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser for the module's tests."""
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def _open(page: Page, made: Made, tmp_path: Path, **options) -> None:
    path = tmp_path / "report.html"
    path.write_text(html(made.run()))
    page.errors.clear()
    page.requests.clear()
    page.open(path, **options)


def _canvas(page: Page) -> tuple[float, float, float, float]:
    page.run("byId('stage').scrollIntoView({block: 'center'})")
    left, top, width, height = page.run(
        "(() => { const b = byId('canvas').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    return left, top, width, height


def test_everything_is_in_the_file():
    """Catches a page that needs a network, or a file beside it, to be read."""
    made = Made()
    data_parallel(made, [[4.0, 5.0]] * 4)
    page = html(made.run())
    assert "default-src 'none'" in page
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!#)[^"' >]+""", page) == []
    assert "@import" not in page
    assert "url(" not in page
    assert "{{" not in re.sub(r'<script id="data".*?</script>', "", page, flags=re.DOTALL)


def test_texts_of_the_run_are_data_and_never_markup():
    """Catches a span name that ends the script, or is put in as markup."""
    made = _large(2, 8, HOSTILE)
    page = html(made.run())
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data
    assert any(HOSTILE in name for name in json.loads(data)["timeline"]["names"])
    assert page.count("</script>") == 2
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.replace(data, ""))


def test_a_large_run_stays_small():
    """Catches a page that no browser can open: what a slice takes, times the most slices there can be, and the rest."""
    made = _large(100, 160)
    assert len(html(made.run())) < (1 << 20) + 25 * len(made.rows)
    assert (1 << 20) + 25 * BUDGET < 15 << 20


def test_command_writes_the_file(tmp_path, capsys):
    """Catches a report that is not written, or half, or beside its place."""
    spool = Spool(tmp_path / "run")
    spool.segment(1, ended(span(1, 0, 1, name="x")), resource=resource(rl__run__id="my-run"))
    out = tmp_path / "report.html"
    assert cli.main(["report", str(spool.run_dir), "--html", str(out)]) == cli.OK
    assert "my-run" in out.read_text()
    assert cli.main(["report", str(spool.run_dir), "--html", str(tmp_path)]) == cli.UNUSABLE
    assert "is a directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


@browser_only
@pytest.mark.parametrize("dark", [False, True])
def test_page_loads_without_an_error_or_a_request(page, tmp_path, dark):
    """Catches a script that fails on some run, and a page that calls out."""
    made = Made()
    data_parallel(made, [[4.0, 4.0, 6.0]] * 5, collective=True)
    _open(page, made, tmp_path, dark=dark)
    assert page.errors == []
    assert page.requests == []
    assert page.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert "training[2] on node-0 is slow" in page.run("byId('findings').textContent")
    for section in ("goodput", "timeline", "steps", "path", "stragglers", "bubbles", "names", "processes", "loss"):
        assert page.run(f"byId('{section}').textContent.length") > 40, section
    page.run("byId('theme').click()")
    assert page.run("document.documentElement.dataset.theme") == ("light" if dark else "dark")


@browser_only
@pytest.mark.parametrize("dark", [False, True])
def test_windows_are_drawn(page, tmp_path, dark):
    """Catches windows that the page leaves out, cuts off, or draws elsewhere; and one left out drawn as 0 %."""
    made = Made()
    data_parallel(made, [[4.0, 5.0]] * 60)
    run = made.run()
    run.windows = Windows([stretch("2s..3s")], every_ns=SECOND)
    path = tmp_path / "report.html"
    path.write_text(html(run))
    page.errors.clear()
    page.open(path, dark=dark)
    assert page.errors == []
    told = page.run("report.goodput.windows.length")
    assert told > 500
    groups = "document.querySelectorAll('#goodput svg g')"
    assert page.run(f"{groups}.length") == told
    assert page.run(f"{groups}[2].children.length") == 0
    assert page.run(f"getComputedStyle({groups}[0].children[0]).fill").startswith("rgb(")
    left, right = page.run(
        f"[{groups}[0].children[0], {groups}[{told - 1}].children[0]].map((r) => r.getBoundingClientRect().left)"
    )
    assert left < right
    shown = page.run("byId('goodput').textContent")
    assert "all of it was left out" in shown
    assert f"in {told} windows" in shown


@browser_only
def test_empty_run_loads(page, tmp_path):
    """Catches a page that needs at least one span, step or rank."""
    _open(page, Made(), tmp_path)
    assert page.errors == []


@browser_only
def test_hostile_names_are_shown_as_they_are(page, tmp_path):
    """Catches a name that becomes part of the page."""
    made = _large(2, 8, HOSTILE)
    made.driver.node = HOSTILE
    _open(page, made, tmp_path)
    assert page.errors == []
    assert page.requests == []
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title") == "made: raytrace_rl report"
    assert HOSTILE in page.run("byId('names').textContent")


@browser_only
def test_timeline_zooms_and_moves(page, tmp_path):
    """Catches a timeline that does not answer to wheel, mouse, keys and buttons."""
    _open(page, _large(4, 80), tmp_path)
    left, top, width, height = _canvas(page)
    whole = page.run("timeline.to - timeline.from")
    x, y = left + 240 + (width - 240) / 2, top + height / 2
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)
    zoomed = page.run("timeline.to - timeline.from")
    assert zoomed < whole / 2
    assert page.run("timeline.from") > 0, "around where the mouse is"
    before = page.run("timeline.from")
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left")
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert page.run("timeline.from") > before
    page.run("byId('fit').click()")
    assert page.run("timeline.to - timeline.from") == whole
    page.run("byId('canvas').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="w", text="w")
    assert page.run("timeline.to - timeline.from") < whole
    assert page.errors == []


@browser_only
def test_a_click_shows_a_span_and_a_double_click_zooms_to_it(page, tmp_path):
    """Catches a click that finds another span than the one under the mouse."""
    made = Made()
    step = made.step(0, 100)
    made.span(made.driver, "the one", 40, 60, step, bucket="productive")
    _open(page, made, tmp_path)
    left, top, width, _ = _canvas(page)
    # The driver's track: below ruler, critical path and group; the second row of spans.
    x, y = left + 240 + (width - 240) / 2, top + 22 + 22 + 22 + 15 + 8
    page.click(x, y)
    assert page.run("byId('detail').textContent").startswith("the one")
    assert "20.00s from 40.00s, productive" in page.run("byId('detail').textContent")
    page.click(x, y, count=2)
    assert page.run("[timeline.from / 1e6, timeline.to / 1e6].map(Math.round)") == [39, 61]


@browser_only
def test_filter_leaves_what_matches(page, tmp_path):
    """Catches a filter that hides what was asked for, or cannot be taken back."""
    made = _large(6, 16)
    special = made.rank(99, "special")
    made.span(special, "needle", 10, 20)
    _open(page, made, tmp_path)
    rows = page.run("timeline.items.length")
    page.run("byId('filter').value = 'NEEDLE'; byId('filter').dispatchEvent(new Event('input'))")
    shown = page.run("timeline.items.filter((i) => i.kind === 'track').map((i) => timeline.source.lanes[i.lane].label)")
    assert [label.split()[0] for label in shown] == ["special[99]"]
    page.run("byId('filter').value = 'training[3]'; byId('filter').dispatchEvent(new Event('input'))")
    assert page.run("timeline.items.filter((i) => i.kind === 'track').length") == 1
    page.run("byId('filter').value = ''; byId('filter').dispatchEvent(new Event('input'))")
    assert page.run("timeline.items.length") == rows
    page.run("document.querySelector('[data-bucket=productive]').click()")
    assert page.run("timeline.hidden.has('productive')") is True
    assert page.errors == []


@browser_only
def test_collapsed_groups_open(page, tmp_path):
    """Catches groups of a large run that stay shut."""
    _open(page, _large(80, 8), tmp_path)
    assert page.run("timeline.items.filter((i) => i.kind === 'track').length") == 0, "80 lanes are shut at first"
    left, top, *_ = _canvas(page)
    page.click(left + 60, top + 22 + 22 + 22 + 11)
    assert page.run("timeline.items.filter((i) => i.kind === 'track').length") == 8, "the lanes of the node clicked on"
    page.run("byId('expand').click()")
    assert page.run("timeline.items.filter((i) => i.kind === 'track').length") == 81


@browser_only
@pytest.mark.parametrize("lanes", [64, pytest.param(2000, marks=pytest.mark.slow)])
def test_of_many_lanes_only_what_is_seen_is_drawn(page, tmp_path, lanes):
    """Catches a timeline that draws what nobody sees, and crawls at two thousand lanes."""
    _open(page, _large(lanes, 64 if lanes > 100 else 400), tmp_path)
    page.run("byId('expand').click()")
    assert page.run("timeline.items.length") > lanes
    page.run(
        "window.drawn = 0; const row = timeline.drawRow; timeline.drawRow = function (...a) "
        "{ window.drawn += 1; return row.apply(this, a); }; timeline.scroll = 400; timeline.draw()"
    )
    assert 0 < page.run("window.drawn") < 80
    page.run("byId('filter').value = 'training[7]'; byId('filter').dispatchEvent(new Event('input'))")
    assert page.run("timeline.items.filter((i) => i.kind === 'track').length") == 1
    assert page.errors == []


@browser_only
def test_a_step_leads_to_its_place_on_the_timeline(page, tmp_path):
    """Catches a bar of the step chart that leads somewhere else."""
    made = Made()
    data_parallel(made, [[4.0, 5.0]] * 6)
    _open(page, made, tmp_path)
    page.run("document.querySelectorAll('#steps svg g')[3].dispatchEvent(new Event('click'))")
    assert page.run("[timeline.from, timeline.to].map((t) => Math.round(t / 1e6))") == [30, 36]
    assert page.errors == []
