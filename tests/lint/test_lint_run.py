"""The linter as a whole: opt-outs, paths, unreadable files, the command, `assert_wired`, its page, its speed."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from raytrace_rl.cli import main
from raytrace_rl.lint import RULES, Severity, UnreadablePathError, lint, lint_paths
from raytrace_rl.lint.table import renewed, table
from raytrace_rl.testing import assert_wired
from tests.lint import test_lint_lifecycle, test_lint_metrics, test_lint_spans, test_lint_wiring
from tests.lint.lint_sources import PRELUDE, agree, found, one, write

ROOT = Path(__file__).parent.parent.parent
BAD = "with span_cm('x'): ..."

OPT_OUTS = {
    "on the line": f"{BAD}  # raytrace: ignore[RT204] the dashboard expects it",
    "above": f"# raytrace: ignore[RT204] the dashboard expects it\n{BAD}",
    "above, with more comments": f"# raytrace: ignore[RT204] the dashboard expects it\n# and more\n\n{BAD}",
    "several": "with umbrella_span(G.REWARD, 'x'): ...  # raytrace: ignore[RT201, RT204] because",
    "colon": f"{BAD}  # raytrace: ignore[RT204]: the dashboard expects it",
    "on a later line of the call": "with umbrella_span(\n    G.U_STEP, 'x'  # raytrace: ignore[RT204] because\n): ...",
    "at a definition": "class W:\n    @accepts_trace_context\n"
    "    def m(self):  # raytrace: ignore[RT102] users dispatch it\n        return 1",
    "in a string": 'text = "# raytrace: ignore[RT204] no comment"',
    "no reason": f"{BAD}  # raytrace: ignore[RT204]  #! RT901 RT204",
    "no rule": f"{BAD}  # raytrace: ignore because  #! RT901 RT204",
    "unused": "x = 1  # raytrace: ignore[RT204] because  #! RT902",
    "another rule's": f"{BAD}  # raytrace: ignore[RT201] because  #! RT902 RT204",
    "no such rule": f"{BAD}  # raytrace: ignore[RT999, RT204] because  #! RT902",
    "of the linter's own": f"{BAD}  # raytrace: ignore[RT204, RT902] because  #! RT902",
    "not on the next line": f"x = 1  # raytrace: ignore[RT204] because  #! RT902\n{BAD}  #! RT204",
}


@pytest.mark.parametrize("name", OPT_OUTS)
def test_opt_outs(name, tmp_path):
    """Catches an opt-out that does nothing, works without a reason, covers too much, or outlives what it was for."""
    source = OPT_OUTS[name]
    if "#! " in source:  # the mark is no reason
        source = source.replace("]  #! RT901", "] #! RT901")
    expected = write(tmp_path, one(source))
    path = tmp_path / "main.py"
    path.write_text(path.read_text().replace("#! RT901 RT204", "").replace("#! RT902", ""))
    assert found(tmp_path) == expected


def test_rules_are_described():
    """Catches a rule without an id that a user can type, or without a way out in its message."""
    assert all(rule.what and rule.instead and rule.name for rule in RULES.values())
    assert [rule.id for rule in RULES.values()] == sorted(RULES)
    assert {rule.id for rule in RULES.values() if rule.severity is Severity.INFO} == {"RT104"}


def test_every_rule_has_sources_that_break_it_in_one_file_and_across_files():
    """Catches a rule that nothing shows to work, or only where everything stands in one file."""
    families = (test_lint_lifecycle, test_lint_metrics, test_lint_spans, test_lint_wiring)
    one_file = " ".join(source for family in families for source in family.FAILING.values())
    several = " ".join(text for family in families for files in family.CROSS_FILE.values() for text in files.values())
    rules = {rule for rule in RULES if not rule.startswith("RT9")}  # those are about the opt-outs and the files
    assert rules <= set(re.findall(r"RT\d+", one_file))
    assert rules <= set(re.findall(r"RT\d+", several))
    assert all(family.PASSING for family in families)


def test_the_page_has_the_table_of_the_code():
    """Catches a rule that is documented as it was. The way out: ``python -m raytrace_rl.lint.table docs/lint.md``."""
    page = (ROOT / "docs" / "lint.md").read_text()
    assert table() in page
    assert renewed(page) == page


def test_a_message_says_where_what_and_what_instead(tmp_path):
    """Catches a finding that cannot be acted on."""
    write(tmp_path, one(BAD))
    (only,) = lint_paths([tmp_path])
    assert str(only) == f"{tmp_path / 'main.py'}:2:14: RT204 error: {only.message}"
    assert "'x' is no name for a span" in only.message
    assert "rl.<algorithm>.<phase>" in only.message
    assert "\n" not in str(only)


def test_findings_are_about_what_was_given(tmp_path):
    """Catches findings in files that were only read besides, and files that are checked twice."""
    write(tmp_path, {"pkg/__init__.py": "", "pkg/a.py": BAD, "pkg/b.py": BAD})
    assert found(tmp_path, "pkg/a.py", "pkg/a.py") == {("pkg/a.py", 2, "RT204")}
    assert len(lint_paths([tmp_path, tmp_path / "pkg", tmp_path / "pkg" / "b.py"])) == 2


def test_directories_without_code_of_ones_own_are_skipped(tmp_path):
    """Catches hours in a virtual environment, and findings in it."""
    write(tmp_path, {f"{name}/a.py": BAD for name in (".venv", "site-packages", "build", "__pycache__", "env")})
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert found(tmp_path) == set()
    assert found(tmp_path, "build") == {("build/a.py", 2, "RT204")}


def test_unreadable_paths(tmp_path):
    """Catches a misspelt path that passes as clean."""
    with pytest.raises(UnreadablePathError, match="nowhere: No such file"):
        lint([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    "source",
    [b"def f(:\n", b"x = '\0'\n", b"# -*- coding: nonsense -*-\n", b"\xff\xfe = 1\n", b"x = (" * 300, b"print 'two'\n"],
)
def test_a_file_that_is_no_python_is_a_finding(source, tmp_path):
    """Catches a linter that ends, or says nothing, where it cannot read: in a file of another concern too."""
    (tmp_path / "broken.py").write_bytes(b"# ray\n" + source)
    (tmp_path / "other.py").write_bytes(b"# nothing of ours\n" + source)
    assert [(name, rule) for name, _, rule in sorted(found(tmp_path))] == [
        ("broken.py", "RT903"),
        ("other.py", "RT903"),
    ]


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path):
    """Catches a check that hangs on a pipe, or reads a device for ever: in a directory, or given by itself."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    assert sorted(found(tmp_path)) == [("pipe.py", 1, "RT903"), ("zero.py", 1, "RT903")]
    for path in (tmp_path / "pipe.py", Path("/dev/zero")):
        with pytest.raises(UnreadablePathError, match="No regular file"):
            lint([path])


def test_odd_but_valid_files(tmp_path):
    """Catches a linter that ends on syntax of its own time or on an unusual encoding."""
    sources = [
        b"",
        b"\xef\xbb\xbfimport ray\n",
        b"# -*- coding: latin-1 -*-\n# ray\nx = '\xe9'\n",
        b"import ray\nx = '\\d'\n",
        b"import ray\nfrom . import y\nfrom ... import z\nfrom .. import *\n",
        b"import ray\nmatch x:\n    case {'a': [1, *rest]} if rest: pass\n",
        b"import ray\na = a = a\nb: int\nfor a.x, (b, *c) in d: pass\nwith e as (f, g): pass\n",
        b"import ray\nself.x = self.x\ndef f(x=lambda y, *z: y, /, *, w, **k): return f(**k)\n",
        b"import ray\nclass A(A): pass\nclass B(C): pass\nclass C(B): pass\nA.remote().x.remote()\nB.remote().y()",
        b"import ray\nfrom odd import thing\nthing = thing\nthing.remote.remote()\ngetattr(a, b)(c).remote()",
    ]
    chain = "+".join(["a"] * 800)
    sources.append(
        f"from raytrace_rl import span_cm\nwith span_cm({chain}, n={chain}): ...\nx{'.a' * 700}.remote()".encode()
    )
    sources.append(b"import ray\nfrom odd12 import *\nq.remote()\n")
    sources.append(b"import ray\nfrom odd11 import *\nfrom odd12 import *\nq = q\nq.x.remote()\n")
    for number, source in enumerate(sources):
        (tmp_path / f"odd{number}.py").write_bytes(source)
    (tmp_path / "odd.py").write_text("from odd import thing\nfrom odd1 import *\nimport raytrace_rl\n")
    assert found(tmp_path) == set()


def test_the_library_s_own_code_may_do_what_it_is_for(tmp_path):
    """Catches rules for algorithm code that are held against the library."""
    write(tmp_path, {"raytrace_rl/__init__.py": "", "raytrace_rl/_a.py": "from raytrace_rl._b import span_cm\n" + BAD})
    assert found(tmp_path) == set()


def test_command(tmp_path, capsys):
    """Catches a command whose exit code a build cannot use."""
    write(tmp_path, {"bad/a.py": BAD, "good/a.py": "x = 1", "info/a.py": INFO})
    assert main(["lint", str(tmp_path / "bad")]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'bad' / 'a.py'}:2:14: RT204 error: ")
    assert err == "1 file: 1 error, 0 for information\n"
    assert main(["lint", str(tmp_path / "good")]) == 0
    assert capsys.readouterr() == ("", "1 file: 0 errors, 0 for information\n")
    assert main(["lint", str(tmp_path / "info")]) == 0
    assert "RT104 info: " in capsys.readouterr().out
    assert main(["lint", str(tmp_path / "good"), str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr() == ("", f"raytrace-rl: {tmp_path / 'nowhere'}: No such file or directory\n")
    assert main(["lint"]) == 2


INFO = "@ray.remote\nclass W(TracedActor): ...\nray.kill(W.remote())"


def test_command_json(tmp_path, capsys):
    """Catches a machine's view of the findings that lacks what the lines say."""
    write(tmp_path, {"a.py": BAD, "b.py": INFO})
    assert main(["lint", "--json", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    loaded = json.loads(out)
    assert (loaded["schema"], loaded["files"]) == (1, 2)
    first, second = loaded["findings"]
    assert (first["path"], first["line"], first["column"], first["rule"]) == (str(tmp_path / "a.py"), 2, 14, "RT204")
    assert (first["severity"], second["severity"]) == ("error", "info")
    assert set(first) == {"path", "line", "column", "rule", "severity", "message"}


def test_assert_wired(tmp_path):
    """Catches an assertion that passes where the linter finds a mistake, or where it had nothing to look at."""
    write(tmp_path, {"bad/a.py": f"{BAD}\n{BAD}", "good/a.py": "x = 1", "info/a.py": INFO})
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssertionError) as caught:
        assert_wired([tmp_path / "bad"])
    assert [line.partition(" error")[0].rpartition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        f"{tmp_path}/bad/a.py:2:14",
        f"{tmp_path}/bad/a.py:3:14",
    ]
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_wired([tmp_path / "empty"])
    assert_wired([tmp_path / "good", tmp_path / "info"])


def test_user_code_is_not_run(tmp_path):
    """Catches a linter that imports what it checks."""
    write(tmp_path, one("raise SystemExit(3)"))
    agree(tmp_path, one("raise SystemExit(3)"))


@pytest.mark.slow
def test_speed(tmp_path):
    """Catches a check whose cost grows faster than the tree: 2,000 files in less than 30 seconds."""
    count = 2000
    for number in range(count):
        folder = tmp_path / "tree" / f"part{number % 40}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
        other = (number * 7 + 40) % count
        (folder / f"m{number}.py").write_text(
            SPEED.format(prelude=PRELUDE, number=number, other=other, part=other % 40) + FILLER
        )
    (tmp_path / "tree" / "__init__.py").touch()
    begun = time.process_time()
    report = lint([tmp_path / "tree"])
    spent = time.process_time() - begun
    assert report.files == count + 41
    assert len(report.findings) == count, os.linesep.join(map(str, report.findings[:5]))
    assert spent < 30


SPEED = """\
{prelude}
from tree.part{part}.m{other} import Worker{other} as Other

@ray.remote
class Worker{number}(TracedActor):
    def __init__(self, buffer):
        super().__init__()
        self.buffer = traced(buffer)
        self.others = [Other.remote(self.buffer) for _ in range(2)]

    @accepts_trace_context
    def generate{number}(self, x):
        with managed_span(G.GENERATION, "rl.grpo.generation", rows=len(x)) as span:
            safe_set_span_attributes(span, {{"rl.rows": 1}})
            return self._hand_on(x, **trace_context_kwargs())

    def _hand_on(self, x, **keywords):
        return [other.generate{other}.remote(x, **keywords) for other in self.others]

def run(workers, x):
    for worker in workers:
        worker.generate{number}.remote(x)
"""
FILLER = "".join(
    f"\n\ndef filler{n}(a, b):\n    total = sum(x * {n} for x in a)\n    return {{'total': total, 'b': [b, str(b)]}}\n"
    for n in range(20)
)
