"""Change what a source yields: cast, rename, select, exclude, or a rule of one's own.

    session.push(streamer.cast(streamer.exclude(model, "lm_head.weight"), "bfloat16"))

Each takes what `streamer.open_source` takes and returns a `WeightSource`, so they nest. What one of
them opened itself is closed with its result; a `WeightSource` stays its owner's to close. None has
the ``weight_version`` of what it changes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from streamer.defaults import CastDtype
from streamer.exceptions import StreamerError, UsageError, one_line
from streamer.payloads import cast_payload, read_tensor
from streamer.source import Payload, TensorSpec, WeightSource
from streamer.transformed import Output, Transformed

CAST_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in CastDtype)
"""What `cast` casts from and to. Narrower floats mean nothing without their scales."""

Edit = tuple[TensorSpec, Callable[[torch.Tensor], torch.Tensor] | None]


def cast(source: object, dtype: torch.dtype | str, *, keep: Iterable[str] = ()) -> WeightSource:
    """Send every floating-point tensor of ``source`` as ``dtype``: bfloat16, float16, and so on.

    Integers, complex numbers, fp8 and fp4 stay as they are, and so do scales (where the last part
    of the name has ``scale`` in it) and names that a glob in ``keep`` matches. A deferred tensor
    stays deferred. Raises `UsageError` for a dtype that is not of `CAST_DTYPES`.
    """
    target = _dtype(dtype)
    kept = _texts("keep", [keep] if isinstance(keep, str) else keep)

    def rule(spec: TensorSpec) -> Sequence[Output]:
        if (
            spec.dtype not in CAST_DTYPES
            or spec.dtype == target
            or "scale" in spec.name.rpartition(".")[2]
            or any(fnmatch.fnmatchcase(spec.name, glob) for glob in kept)
        ):
            return [Output(spec)]
        return [Output(replace(spec, dtype=target), partial(cast_payload, spec.dtype, target))]

    return Transformed(source, rule, partial(_check_globs, "keep", kept))


def rename(
    source: object,
    names: Mapping[str, str] | Callable[[str], str] | str | re.Pattern[str],
    replacement: str | None = None,
) -> WeightSource:
    r"""Rename the tensors of ``source``; payloads are not touched.

    ``names`` is a mapping of old names to new ones, a function of the old name, or a regular
    expression that is replaced by ``replacement`` wherever it is found, as in
    ``rename(source, r"^model\.", "language_model.")``.

    Raises `UsageError` if two names become one, for a mapping or an expression that fits none, and
    for a function that raises or returns no name.
    """
    change: Callable[[str], str]
    expected: Sequence[str] = ()
    pattern: re.Pattern[str] | None = None
    if isinstance(names, (str, re.Pattern)):
        pattern, change = _substitution(names, replacement)
    elif replacement is not None:
        raise UsageError("rename: a replacement goes with a regular expression only")
    elif isinstance(names, Mapping):
        mapping = dict(names)
        expected = list(mapping)

        def change(name: str) -> str:
            return mapping.get(name, name)
    elif callable(names):
        change = names
    else:
        raise UsageError(
            f"rename: give a mapping, a function or a regular expression, not {names!r:.100}"
        )

    def rule(spec: TensorSpec) -> Sequence[Output]:
        with _blamed(f"rename: {_called(names)}", spec):
            new = change(spec.name)
        if not isinstance(new, str) or not new:
            raise UsageError(f"rename: {spec.name} would be called {new!r:.100}")
        return [Output(replace(spec, name=new))]

    def check(specs: Sequence[TensorSpec]) -> None:
        present = {spec.name for spec in specs}
        absent = [name for name in expected if name not in present]
        if absent:
            raise UsageError(f"rename: the source has no tensor {absent[0]}")
        if pattern is not None and not any(map(pattern.search, present)):
            raise UsageError(
                f"rename: {pattern.pattern!r} is in none of the names, of which {_first(specs)} "
                "is one"
            )

    return Transformed(source, rule, check)


def select(source: object, *globs: str) -> WeightSource:
    """Send only the tensors whose name one of ``globs`` matches (``model.layers.0.*``).

    The server keeps the rest of what it has. Raises `UsageError` if a glob matches none.
    """
    if not globs:
        raise UsageError("select: give at least one glob")
    return _chosen(source, "select", globs, True)


def exclude(source: object, *globs: str) -> WeightSource:
    """Do not send the tensors whose name one of ``globs`` matches. See `select`."""
    return _chosen(source, "exclude", globs, False)


def map_tensors(
    source: object, rule: Callable[[TensorSpec], Sequence[Edit] | None]
) -> WeightSource:
    """Export under other names, in other layouts: ``rule`` says what becomes of each tensor.

    ``rule(spec)`` returns None to leave a tensor alone, or a list of ``(new spec, function)``, one
    for each tensor that it becomes: none to drop it, several to split it. A function is given the
    tensor (a deferred one is read first, once) and returns one that is as the new spec says, a view
    for example; None in its place changes only the name. The rule is called for the specs and again
    for the payloads, and must say the same both times. Raises `UsageError` if it raises, or returns
    something else.
    """
    if not callable(rule):
        raise UsageError(
            f"map_tensors: the rule must be a function of a TensorSpec, not {rule!r:.100}"
        )
    what = f"map_tensors: {_called(rule)}"

    def outputs(spec: TensorSpec) -> Sequence[Output]:
        with _blamed(what, spec):
            said: object = rule(spec)
            # A generator function runs only here.
            edits = list(said) if isinstance(said, Iterable) else said
        if edits is None:
            return [Output(spec)]
        if not isinstance(edits, list):
            raise UsageError(f"{what} must return None or a list, for {spec}: not {edits!r:.100}")
        once = _Once(spec)
        made: list[Output] = []
        for edit in edits:
            if not _is_edit(edit):
                raise UsageError(
                    f"{what} must return pairs of a streamer.TensorSpec and a function or None, "
                    f"for {spec}: not {edit!r:.100}"
                )
            new, function = edit
            make = () if function is None else (partial(once.apply, function),)
            made.append(Output(new, *make))
        return made

    return Transformed(source, outputs, lasting=False)


def _is_edit(edit: object) -> bool:
    return (
        isinstance(edit, tuple | list)
        and len(edit) == 2
        and isinstance(edit[0], TensorSpec)
        and (edit[1] is None or callable(edit[1]))
    )


def _called(function: object) -> str:
    """What a user calls a function of his own."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


@contextlib.contextmanager
def _blamed(what: str, spec: TensorSpec) -> Iterator[None]:
    """Report what the user's code in the block raises as its failure at a tensor."""
    try:
        yield
    except StreamerError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} failed at {spec}: {type(error).__name__}: {one_line(error)}"
        ) from error


class _Once:
    """Reads a deferred tensor for the first of several functions, and keeps it for the others."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._tensor: torch.Tensor | None = None

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], payload: Payload
    ) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = read_tensor(payload, self._spec)
        return function(self._tensor)


def _chosen(source: object, what: str, globs: Sequence[str], wanted: bool) -> WeightSource:
    match = re.compile("|".join(map(fnmatch.translate, _texts(what, globs))) or r"(?!)").match

    def rule(spec: TensorSpec) -> Sequence[Output]:
        return [Output(spec)] if (match(spec.name) is not None) is wanted else []

    return Transformed(source, rule, partial(_check_globs, what, globs))


def _texts(what: str, globs: Iterable[object]) -> list[str]:
    texts: list[str] = []
    for glob in globs:
        if not isinstance(glob, str):
            raise UsageError(f"{what}: a glob is a text, not {glob!r:.100}")
        texts.append(glob)
    return texts


def _check_globs(what: str, globs: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    for glob in globs:
        match = re.compile(fnmatch.translate(glob)).match
        if not any(match(spec.name) for spec in specs):
            raise UsageError(
                f"{what}: {glob!r} matches none of the names, of which {_first(specs)} is one"
            )


def _first(specs: Sequence[TensorSpec]) -> str:
    return specs[0].name if specs else "(no tensor)"


def _substitution(
    names: str | re.Pattern[str], replacement: str | None
) -> tuple[re.Pattern[str], Callable[[str], str]]:
    if replacement is None:
        raise UsageError("rename: a regular expression needs a replacement")
    try:
        pattern = re.compile(names)
        pattern.sub(replacement, "")
    except (re.error, IndexError, TypeError) as error:
        raise UsageError(f"rename: {names!r} to {replacement!r}: {error}") from None
    return pattern, lambda name: pattern.sub(replacement, name)


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    known = {str(known).removeprefix("torch."): known for known in CAST_DTYPES}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise UsageError(f"cast: dtype must be one of {', '.join(known)}, not {name}")
    return known[name]
