"""A source that yields the tensors of another, changed by a rule.

Of use where `streamer.cast` and its like do not do: a plugin gives a `Rule` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamer.exceptions import UsageError
from streamer.ranks import Ranks
from streamer.registry import open_source
from streamer.source import Payload, TensorSpec, WeightSource, checked, specs_of


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a rule makes of another: its spec, and its payload made of the other's."""

    spec: TensorSpec
    make: Callable[[Payload], Payload] = lambda payload: payload


Rule = Callable[[TensorSpec], Sequence[Output]]
"""What becomes of a tensor: the outputs that it is replaced by."""


class Transformed(WeightSource):
    """A source whose every tensor becomes the outputs of ``rule``: none, one or several.

    The rule is asked for each spec, by `specs` and by the iterator alike, so that the two agree. It
    must say the same each time. ``check`` may raise for all specs of the source together.
    ``lasting`` says that the rule itself writes over no tensor that it has made. The source's
    ``weight_version`` is not passed on: a server that has those weights does not have these.
    """

    def __init__(
        self,
        source: object,
        rule: Rule,
        check: Callable[[Sequence[TensorSpec]], None] = lambda specs: None,
        *,
        lasting: bool = True,
    ) -> None:
        self._given = isinstance(source, WeightSource)
        self._source = open_source(source)
        self._rule = rule
        self._check = check
        self._lasting = lasting
        try:
            self.specs()
        except BaseException:
            self.close()
            raise

    @property
    def lasting(self) -> bool:  # type: ignore[override]  # it is the source's
        """See `WeightSource.lasting`."""
        return self._lasting and self._source.lasting

    def progress(self) -> int:
        """See `WeightSource.progress`."""
        return self._source.progress()

    @property
    def ranks(self) -> Ranks | None:  # type: ignore[override]  # it is the source's
        """See `WeightSource.ranks`."""
        return self._source.ranks

    def catch_up(self, stop: int | None) -> None:
        """See `WeightSource.catch_up`."""
        if stop is not None:
            made = taken = 0
            for spec in specs_of(self._source):
                if made >= stop:
                    break
                made += len(self._rule(spec))
                taken += 1
            stop = taken
        self._source.catch_up(stop)

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.specs`. Raises `UsageError` if two tensors get one name."""
        given = specs_of(self._source)
        self._check(given)
        made: dict[str, str] = {}
        specs: list[TensorSpec] = []
        for spec in given:
            for output in self._rule(spec):
                name = output.spec.name
                if name in made:
                    raise UsageError(f"{made[name]} and {spec.name} would both be called {name}")
                made[name] = spec.name
                specs.append(output.spec)
        return specs

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        given = specs_of(self._source)
        payloads = checked(self._source, given)
        for spec in given:
            yield from self._made_of(spec, next(payloads))
        next(payloads, None)

    def _made_of(self, spec: TensorSpec, payload: Payload) -> Iterator[tuple[str, Payload]]:
        """By itself, so that nothing here holds a payload, or what a rule keeps of it, while the
        source makes the next one."""
        for output in self._rule(spec):
            yield output.spec.name, output.make(payload)

    def close(self) -> None:
        """Close the source, if it was opened here."""
        if not self._given:
            self._source.close()
