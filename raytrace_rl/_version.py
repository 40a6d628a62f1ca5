"""The version of this package, where the build and the running process both find it without reading metadata."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
