"""What the identifiers in an expression say about its value: raw text, something that grows with every step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

_MAX_DEPTH: Final = 20
_SPLIT: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
#: Functions whose result says what their argument says.
_PASSING: Final = frozenset({"str", "repr", "ascii", "format", "int", "hex", "list", "tuple", "dumps", "join"})
#: Methods whose result says what their object says.
_SAME: Final = frozenset({"strip", "lower", "upper", "replace", "hex", "item", "tolist", "encode", "format", "copy"})

_TEXTS: Final = frozenset(
    {"prompt", "prompts", "completion", "completions", "response", "responses", "message", "messages"}
)
#: What a text is called when its key says which one it is.
_CONTENTS: Final = frozenset({"text", "texts", "content", "contents", "body", "string", "raw", "decoded", "output"})
#: As a key alone, these name one text, whatever its value is called.
_ONE_TEXT: Final = frozenset({"prompt", "completion", "response", "message"})
#: Values that are none under such a key: positions, numbers, and why something went wrong.
_NO_TEXT: Final = frozenset(
    {"i", "j", "k", "n", "number", "position", "error", "exc", "exception", "reason", "code", "score", "reward"}
)
#: A word that makes a number or an id of the text that is named with it.
_MEASURES: Final = frozenset(
    {
        "num", "n", "nb", "no", "total", "count", "counts", "max", "min", "len", "length", "lengths", "mean", "avg",
        "per", "has", "is", "id", "ids", "index", "idx", "hash", "size", "rate", "type", "status", "version", "time",
    }
)  # fmt: skip

_GROWING: Final = frozenset(
    {
        "step", "global_step", "iteration", "iter", "episode", "timestamp", "uuid", "guid", "request_id", "prompt_id",
        "sample_id", "trajectory_id", "rollout_id", "batch_id", "episode_id", "conversation_id", "session_id",
        "message_id", "trace_id", "span_id", "token_id", "group_id", "req_id", "uid",
    }
)  # fmt: skip
_GROWING_SUFFIXES: Final = tuple(f"_{word}" for word in ("step", "iteration", "uuid", "timestamp", *sorted(_GROWING)))
#: Functions whose result is new each time.
_UUIDS: Final = frozenset({"uuid1", "uuid4", "uuid7", "time", "time_ns", "token_hex"})


def words(identifier: str) -> list[str]:
    """Splits ``num_promptTokens`` into lower-case words."""
    return [word.lower() for word in _SPLIT.split(identifier) if word]


def flows(node: ast.AST) -> Iterator[str]:
    """Yields the identifiers whose value an expression passes on as it is; not what it measures or compares."""
    for identifier, _ in flowing(node):
        yield identifier


def flowing(node: ast.AST, depth: int = 0) -> Iterator[tuple[str, ast.AST]]:
    """As `flows`, each identifier with the node that it stands in."""
    if depth > _MAX_DEPTH:
        return
    parts: list[ast.expr] = []
    if isinstance(node, ast.Name):
        yield node.id, node
    elif isinstance(node, ast.Attribute) and node.attr not in _SAME:
        yield node.attr, node
    elif isinstance(node, ast.Attribute):
        parts = [node.value]
    elif isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            yield node.slice.value, node
        else:
            parts = [node.value]
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        of_few = isinstance(node.op, ast.Mod) and isinstance(node.right, ast.Constant)  # step % 10
        parts = [] if of_few else [node.left, node.right]
    elif isinstance(node, (ast.Tuple, ast.List)):
        parts = node.elts
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _PASSING:
            parts = list(node.args)
        if isinstance(node.func, ast.Attribute) and name in _SAME:
            parts.append(node.func.value)
        if name in _UUIDS or (name in {"decode", "batch_decode"} and _is_tokenizer(node.func)):
            yield name, node
    for part in parts:
        yield from flowing(part, depth + 1)


def _is_tokenizer(func: ast.expr) -> bool:
    """``self.tokenizer.decode``, ``tok.batch_decode``."""
    holder = func.value if isinstance(func, ast.Attribute) else func
    return "tok" in getattr(holder, "attr", getattr(holder, "id", "")).lower()


def is_raw_text(key: str | None, value: ast.AST) -> bool:
    """True if ``value`` is a prompt, completion, response or message itself."""
    for identifier in flows(value):
        said = words(identifier)
        if identifier in {"decode", "batch_decode"}:
            return True
        if not said or not _MEASURES.isdisjoint(said):
            continue
        if said[-1] in _TEXTS:
            return True
        key_words = words(key) if key else []
        if not key_words or not _MEASURES.isdisjoint(key_words):
            continue
        if key_words[-1] in _ONE_TEXT and _NO_TEXT.isdisjoint(said):
            return True
        if key_words[-1] in _TEXTS and said[-1] in _CONTENTS:
            return True
    return False


def is_growing(identifier: str) -> bool:
    """True for what makes a value new with every step or request: ``step``, ``request_id``, ``uuid4``."""
    return grows(identifier) or identifier in _UUIDS


def grows(key: str) -> bool:
    """True for a name such as ``rl.iteration``, ``request_id``, ``global_step``."""
    last = "_".join(words(key.rpartition(".")[2]))
    return last in _GROWING or last.endswith(_GROWING_SUFFIXES)
