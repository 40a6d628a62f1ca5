"""`raytrace-rl run` around commands that are no Ray programs: exit codes, signals, environment, start-up files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytrace_rl import _cli_run, cli
from raytrace_rl.config import resolve
from tests.running import wait_for

CLI = [sys.executable, "-m", "raytrace_rl.cli", "run"]


def run(*arguments: object, **options):
    """Runs ``raytrace-rl run`` to its end."""
    return subprocess.run(
        [*CLI, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_code_of_the_command_is_passed_on(tmp_path, code):
    """A failed training looks like a successful one to the scheduler."""
    done = run("--dir", tmp_path, "--", "sh", "-c", f"echo out; exit {code}")
    assert (done.returncode, done.stdout) == (code, "out\n")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_a_signal_that_ends_the_command_is_passed_on_as_shells_do(tmp_path, name):
    """A killed command passes for one that returned, or the summary is lost with it."""
    done = run("--dir", tmp_path, "--", "sh", "-c", f"kill -{name.removeprefix('SIG')} $$")
    assert done.returncode == 128 + getattr(signal, name)
    assert "nothing was recorded" in done.stderr


def test_a_command_that_is_not_there_and_one_that_is_no_program(tmp_path):
    """A typing error ends in a traceback, or in exit code 0."""
    missing = run("--dir", tmp_path, "--", tmp_path / "missing")
    assert missing.returncode == 127
    assert missing.stderr.startswith("raytrace-rl: ")
    assert len(missing.stderr.splitlines()) == 1
    text = tmp_path / "text"
    text.write_text("no program")
    assert run("--dir", tmp_path, "--", text).returncode == 126


@pytest.mark.parametrize(
    ("where", "says"), [("", "--dir is empty"), ("/proc/self/run", "/proc/self/run cannot be used")]
)
def test_a_run_directory_that_cannot_be_is_told_before_anything_runs(where, says):
    """Hours of training whose spans go nowhere; or files of a run between the user's, for a variable that is unset."""
    done = run("--dir", where, "--", "echo", "ran")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_no_command_is_a_usage_error(capsys):
    """Without a command it runs nothing and says nothing."""
    assert cli.main(["run"]) == 2
    assert "name the command after --" in capsys.readouterr().err
    assert cli.main(["run", "--"]) == 2


def test_a_bad_setting_is_told_before_anything_runs(tmp_path):
    """A mistyped variable is found out in a log line of a run of hours."""
    done = run("--", "touch", tmp_path / "ran", env={**os.environ, "RAYTRACE_RL_HEARTBEAT_S": "often"})
    assert done.returncode == 2
    assert "RAYTRACE_RL_HEARTBEAT_S" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_to_the_runner_reaches_the_command(tmp_path, name):
    """A scheduler's notice of preemption ends the runner and leaves the training running, or never arrives."""
    script = tmp_path / "child.py"
    script.write_text(
        "import signal, sys, pathlib\n"
        f"signal.signal(signal.{name}, lambda *_: sys.exit(7))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()\n"
    )
    ready = tmp_path / "ready"
    runner = subprocess.Popen([*CLI, "--dir", str(tmp_path / "run"), "--", sys.executable, str(script), str(ready)])
    try:
        wait_for(ready.exists, "the command's start")
        runner.send_signal(getattr(signal, name))
        assert runner.wait(30) == 7
    finally:
        runner.kill()


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path):
    """Ctrl-C, which a terminal sends to both, arrives twice: the second ends what the first had begun to end well."""
    script = tmp_path / "child.py"
    script.write_text(
        "import signal, sys, pathlib, time\n"
        "hits = []\n"
        "signal.signal(signal.SIGINT, lambda *_: hits.append(1))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while not hits: signal.pause()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "again = signal.sigtimedwait({signal.SIGINT}, 1)\n"
        "sys.exit(10 + len(hits) + (again is not None))\n"
    )
    ready = tmp_path / "ready"
    command = [*CLI, "--dir", str(tmp_path / "run"), "--", sys.executable, str(script), str(ready)]
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(command[0], command)
    wait_for(ready.exists, "the command's start")
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 11


def test_the_command_finds_the_settings_of_the_run(tmp_path):
    """A driver that starts telemetry by itself does so with other settings, in another directory."""
    environ, run_dir = _cli_run.environment({}, str(tmp_path / "my run"), "step,generation")
    settled = resolve({"run_dir": "elsewhere", "span_groups": "default"}, strict=True, environ=environ)
    assert settled.enabled
    assert settled.run_dir == run_dir == str(tmp_path / "my run")
    assert settled.run_id == "my-run"  # that of the directory: once more there is another attempt of the same run
    assert settled.span_groups == "step,generation"


def test_what_the_environment_says_beats_the_defaults_and_the_options_beat_it():
    """An operator's variable is overwritten by a default, or an option that was typed has no effect."""
    base = {"RAYTRACE_RL_SPAN_GROUPS": "job", "RAYTRACE_RL_RUN_ID": "seven", "RAYTRACE_RL_RUN_DIR": "/a"}
    environ, run_dir = _cli_run.environment(base)
    assert (environ["RAYTRACE_RL_SPAN_GROUPS"], environ["RAYTRACE_RL_RUN_ID"], run_dir) == ("job", "seven", "/a")
    environ, run_dir = _cli_run.environment(base, "/b", "all")
    assert (environ["RAYTRACE_RL_SPAN_GROUPS"], environ["RAYTRACE_RL_RUN_ID"], run_dir) == ("all", "seven", "/b")
    assert _cli_run.environment({})[0]["RAYTRACE_RL_SPAN_GROUPS"] == "per_step"


@pytest.mark.parametrize("off", [{"RAYTRACE_RL_ENABLED": "0"}, {"OTEL_SDK_DISABLED": "true"}])
def test_an_operator_can_switch_it_off(tmp_path, off):
    """Telemetry that the environment forbids is on because a launcher says ``run``."""
    environ, run_dir = _cli_run.environment(off)
    assert run_dir is None
    assert environ == off  # nothing of ours, PYTHONPATH included
    done = run("--dir", tmp_path / "run", "--", "true", env={**os.environ, **off})
    assert done.returncode == 0
    assert not (tmp_path / "run").exists()


def test_the_users_sitecustomize_still_runs_and_ours_is_out_of_the_way(tmp_path):
    """A cluster's own sitecustomize (proxies, certificates, coverage) is shadowed by ours."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'ran'\n")
    code = "import sys, sitecustomize; print(theirs, sitecustomize.__file__, [p for p in sys.path if '_run_site' in p])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = run("--dir", tmp_path / "run", "--", sys.executable, "-c", code, env=environ)
    assert done.stdout.split() == ["ran", str(tmp_path / "sitecustomize.py"), "[]"]


def test_a_process_that_uses_no_ray_pays_next_to_nothing(tmp_path):
    """Every tool that a launch script calls imports OpenTelemetry, or starts a run of its own."""
    names = ("raytrace_rl", "opentelemetry", "typing", "importlib.util")
    code = f"import sys; print([m for m in {names} if m in sys.modules])"
    environ = {**os.environ, "PYTHONPATH": str(Path(_cli_run.__file__).with_name("_run_site"))}
    environ["RAYTRACE_RL_AUTO_RAY"] = "1"
    bare = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    command = [sys.executable, "-c", code]
    ours = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ)
    assert ours.stdout == bare.stdout


def test_a_python_without_the_package_runs_untraced_and_says_so(tmp_path):
    """The runner's package is not in the command's environment: the command fails, or is silently not traced."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")
    (tmp_path / "raytrace_rl").mkdir()
    (tmp_path / "raytrace_rl" / "__init__.py").write_text("raise ImportError('not installed here')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import ray; print('goes on')"]
    environ, _ = _cli_run.environment(environ, str(tmp_path / "run"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "nothing is traced by" in done.stderr


def test_a_version_of_ray_that_nobody_tried_is_left_alone_with_one_warning(tmp_path):
    """A new Ray, changed where we reach into it, breaks a run that would have gone well without us."""
    code = """
import ray, ray._private.worker, ray.actor, ray.remote_function
before = [ray.shutdown, ray._private.worker.connect, ray.actor.ActorClass._remote]
ray.__version__ = "9.9.0"
from raytrace_rl.integrations import auto_ray
print(auto_ray.install(), auto_ray.install())
print(before == [ray.shutdown, ray._private.worker.connect, ray.actor.ActorClass._remote])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "False", "True"]
    assert done.stderr.count("Calls of Ray 9.9.0 are not traced") == 1


@pytest.mark.parametrize(
    ("version", "tried"),
    [("2.48.0", True), ("2.53.0", True), ("2.60.1", True), ("2.61.0", False), ("2.9.3", False), ("3.0.0.dev0", False)],
)
def test_versions_are_compared_as_numbers(version, tried):
    """2.9 passes for newer than 2.48."""
    from raytrace_rl.integrations import auto_ray

    assert auto_ray.is_tried(version) is tried
    assert not auto_ray.is_tried("unknown")


def test_a_function_of_rays_that_is_not_what_it_was_is_left_alone(tmp_path):
    """Ray changes an inner function within a version that was tried: what we put around it would break every call."""
    code = """
import ray, ray.actor
def _remote(self, arguments): ...
ray.actor.ActorMethod._remote = _remote
from raytrace_rl.integrations import auto_ray
print(auto_ray.install(), ray.actor.ActorMethod._remote is _remote, hasattr(ray.shutdown, "__wrapped__"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split()[:2] == ["False", "True"]
    assert done.stderr.count("is not what it was") == 1
