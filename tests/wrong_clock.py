"""A wall clock that is wrong, for real processes: a library of a few lines that is loaded before libc.

What asks libc for the time of day in such a process, Python included, is given another one; the monotonic clock stays
right, as it does where somebody sets a host's clock. It needs a C compiler.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <time.h>

static int64_t right, *offset = &right;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_uname)(struct utsname *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("WRONG_CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) offset = page;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_gettime(id, now);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + *(volatile int64_t *)offset;
        now->tv_sec = ns / 1000000000LL;
        now->tv_nsec = ns % 1000000000LL;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

int uname(struct utsname *name) {
    if (!real_uname) real_uname = dlsym(RTLD_NEXT, "uname");
    int result = real_uname(name);
    const char *host = getenv("WRONG_HOST_NAME");
    if (!result && host) strncpy(name->nodename, host, sizeof name->nodename - 1);
    return result;
}
"""


def missing() -> str:
    """Returns what keeps a clock from being wrong here, empty if nothing does."""
    return "" if shutil.which("cc") else "no C compiler"


class WrongClock:
    """The wall clock of the processes that are started with its environment.

    Args:
        directory: Where the library and the clock's file go.
        ahead_ns: How far it is ahead.
    """

    def __init__(self, directory: Path, ahead_ns: int) -> None:
        self._file = directory / "ahead_ns"
        self._library = directory / "wrong_clock.so"
        self._file.write_bytes(bytes(8))
        self.set(ahead_ns)
        source = directory / "wrong_clock.c"
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True, timeout=60)

    def set(self, ahead_ns: int) -> None:
        """Sets the clock, of processes that run too."""
        with self._file.open("r+b") as file:  # in place: they have it mapped
            file.write(struct.pack("<q", ahead_ns))

    def environment(self, host_name: str | None = None) -> dict[str, str]:
        """Returns variables for a process; ``host_name`` is what it is to take its host's name for."""
        variables = {"LD_PRELOAD": os.fspath(self._library), "WRONG_CLOCK_FILE": os.fspath(self._file)}
        return variables | ({"WRONG_HOST_NAME": host_name} if host_name else {})
