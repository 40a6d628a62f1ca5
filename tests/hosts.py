"""Three hosts on one: network, host name, processes, /dev/shm and /tmp/ray of their own; and a SLURM that knows them.

`srun` and `scontrol` are stand-ins of a few lines, put first on ``PATH``; everything that a batch script runs by them
is real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tests.running import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Run on a host, with its name, its files and its hosts table: becomes the host's first process, and reaps.
_BOOT = """
set -e
hostname "$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm
mkdir -p /tmp/ray "$2/ray"
mount --bind "$2/ray" /tmp/ray
mount --bind "$3" /etc/hosts
ip link set lo up
touch "$2/booted"
while :; do sleep 3600 & wait $! || true; done
"""

_SRUN = """
#!{python}
import os, signal, subprocess, sys
from pathlib import Path

arguments = sys.argv[1:]
node = None
while arguments[0].startswith("--"):
    name, _, value = arguments.pop(0).partition("=")
    node = value if name == "--nodelist" else node
host = Path({root!r}, node)
pid = (host / "pid").read_text()
variables = (host / "environment").read_text().splitlines()
enter = ["nsenter", f"--target={{pid}}", "--net", "--uts", "--mount", "--pid", "--", "env", *variables]
child = subprocess.Popen([*enter, "sh", "-c", 'cd "$0"; exec "$@"', os.getcwd(), *arguments])

def forward(number, frame):
    for task in Path(f"/proc/{{child.pid}}/task/{{child.pid}}/children").read_text().split():
        os.kill(int(task), number)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, forward)
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""

_SCONTROL = """
#!/bin/sh
case "$1 $2" in
  "show hostnames") printf '%s\\n' {names} ;;
  requeue*) echo "$2" >> {root}/requeued ;;
esac
"""


class Host:
    """One host.

    Attributes:
        name: Its host name.
        address: Its address.
    """

    def __init__(self, name: str, address: str, home: Path, table: Path) -> None:
        self.name, self.address, self._home = name, address, home
        home.mkdir()
        unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen([*unshare, "sh", "-c", _BOOT, "sh", name, str(home), str(table)])
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        wait_for((home / "booted").exists, f"{name} to boot")
        self.pid = int(children.read_text().split()[0])
        (home / "pid").write_text(str(self.pid))
        self.set_environment({})

    def set_environment(self, variables: dict[str, str]) -> None:
        """Sets what `srun` adds to the environment of what it starts on this host."""
        (self._home / "environment").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))

    def cut_off(self) -> None:
        """Ends the host: every process on it, its network and its /dev/shm."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(30)


def permitted() -> str:
    """Returns why hosts cannot be made here, empty if they can."""
    if os.geteuid() != 0:
        return "hosts of their own need root, to make namespaces"
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link", "add"]
    command += ["name", "probe", "type", "veth"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return tried.stderr.strip()


@contextlib.contextmanager
def hosts(root: Path, count: int) -> Iterator[list[Host]]:
    """Hosts ``host1`` and up on one network, for the length of a ``with`` statement; ``root/bin`` has the stand-ins."""
    table = root / "hosts"
    addresses = {f"host{n}": f"10.77.0.{n}" for n in range(1, count + 1)}
    table.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
    (root / "bin").mkdir()
    stand_ins = {
        "srun": _SRUN.format(python=sys.executable, root=str(root)),
        "scontrol": _SCONTROL.format(names=" ".join(addresses), root=root),
    }
    for name, text in stand_ins.items():
        (root / "bin" / name).write_text(textwrap.dedent(text).lstrip())
        (root / "bin" / name).chmod(0o755)
    switch = Host("switch", "", root / "switch", table)
    made = [switch]
    try:
        _in(switch, "ip", "link", "add", "bridge0", "type", "bridge")
        _in(switch, "ip", "link", "set", "bridge0", "up")
        for name, address in addresses.items():
            host = Host(name, address, root / name, table)
            made.append(host)
            _in(switch, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            _in(switch, "ip", "link", "set", name, "master", "bridge0", "up")
            _in(host, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _in(host, "ip", "link", "set", "eth0", "up")
        yield made[1:]
    finally:
        for host in made:
            host.cut_off()


def _in(host: Host, *command: str) -> None:
    enter = ["nsenter", f"--target={host.pid}", "--net"]
    subprocess.run([*enter, *command], check=True, timeout=30)
