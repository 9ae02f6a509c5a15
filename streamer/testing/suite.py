"""The tests that every source must pass. Authors of plugins subclass `SourceSuite` in their own.

    class TestMySource(SourceSuite):
        def make_source(self, tmp_path):
            save(tmp_path / "weights", WEIGHTS)
            return MySource(tmp_path / "weights")

        def expected(self):
            return WEIGHTS

        def target(self, tmp_path):
            return f"mine://{tmp_path / 'weights'}"

        def make_missing(self, tmp_path):
            return MySource(tmp_path / "nothing")

pytest collects the rest. It is not imported here: another runner may call the methods as well, each
with an empty folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any
from unittest import mock

import torch

from streamer.exceptions import PluginError, StreamerError
from streamer.ranks import Ranks
from streamer.registry import Registry
from streamer.source import TensorSpec, WeightSource
from streamer.testing.checks import (
    abandon,
    check_spec,
    held_too_long,
    in_words,
    new_folder,
    read_in_parts,
    same_bytes,
    same_recordings,
    same_specs,
)
from streamer.testing.delivery import deliver
from streamer.testing.recording import Recorded, bytes_of, kind_of, record, recorded
from streamer.testing.usage import held, left_since, watch

HEADERS = 1 << 16
"""Bytes that ``specs()`` may always read: it has to find the shapes somewhere."""
ROUNDS = 3


class SourceSuite:
    """What `WeightSource` promises, as tests. Each checks one promise, and reports that one only.

    Choose weights of several dtypes and shapes (an empty tensor and a 0-d one among them, if the
    source can have these), in an order that is not the alphabet's. Where a test opens the source
    several times, each time is in a new folder below the test's own.
    """

    options: Mapping[str, Any] = MappingProxyType({})
    """What ``target`` is opened with, besides: `streamer.open_source(target, **options)`."""

    def make_source(self, tmp_path: Path) -> WeightSource:
        """Put the weights into ``tmp_path``, an empty folder, if need be, and open them."""
        raise NotImplementedError(f"{type(self).__name__} must define make_source(tmp_path)")

    def expected(self) -> Mapping[str, torch.Tensor]:
        """What the source must yield, in any order; the same each time."""
        raise NotImplementedError(f"{type(self).__name__} must define expected()")

    def target(self, tmp_path: Path) -> object:
        """What a user gives to `streamer.open_source` for what ``make_source(tmp_path)`` opened.

        ``"scheme://rest"``, or an object that the plugin claims.
        """
        raise NotImplementedError(f"{type(self).__name__} must define target(tmp_path)")

    def make_missing(self, tmp_path: Path) -> WeightSource:
        """Open, in the same way as ``make_source``, what is not there: ``tmp_path`` is empty."""
        raise NotImplementedError(f"{type(self).__name__} must define make_missing(tmp_path)")

    def test_specs_are_sound(self, tmp_path: Path) -> None:
        """Each is a `TensorSpec`; names are unique; a second call says the same."""
        with self._opened(tmp_path) as source:
            specs = list(source.specs())
            again = list(source.specs())
        assert specs, "specs() is empty: there is nothing to send"
        names: dict[str, TensorSpec] = {}
        for index, spec in enumerate(specs):
            check_spec(index, spec)
            other = names.setdefault(spec.name, spec)
            assert other is spec, f"two tensors are called {spec.name}: {other} and {spec}"
        same_specs(specs, again, "specs() said {}, then {}")

    def test_what_it_says_of_itself(self, tmp_path: Path) -> None:
        """``weight_version``, ``ranks``, ``lasting`` and ``progress()`` are of their types."""
        with self._opened(tmp_path) as source:
            said: list[tuple[str, object, tuple[type, ...]]] = [
                ("weight_version", source.weight_version, (str, NoneType)),
                ("ranks", source.ranks, (Ranks, NoneType)),
                ("lasting", source.lasting, (bool,)),
                ("progress()", source.progress(), (int,)),
            ]
        for what, value, kinds in said:
            names = " or ".join(kind.__name__ for kind in kinds)
            assert isinstance(value, kinds), f"{what} is {value!r:.100}, not {names}"

    def test_specs_move_no_data(self, tmp_path: Path) -> None:
        """It neither iterates nor reads or makes as much as half of the weights."""
        with self._opened(tmp_path) as source:
            kind, step = type(source), type(source).__iter__
            iterated: list[WeightSource] = []

            def spy(self: WeightSource) -> Iterator[object]:
                iterated.append(self)
                return step(self)

            with mock.patch.object(kind, "__iter__", spy), watch() as moved:
                specs = source.specs()
            assert not iterated, f"{kind.__name__}.specs() iterates over the source: {specs[0]}"
            limit = max(sum(spec.nbytes for spec in specs) // 2, HEADERS)
            assert moved.total < limit, (
                f"{kind.__name__}.specs() reads {moved.read} bytes and makes {moved.made}; "
                f"it may move {limit}: {specs[0]}"
            )

    def test_order_and_names(self, tmp_path: Path) -> None:
        """The iterator gives the names of ``specs()``, in that order, and the expected ones."""
        with self._opened(tmp_path) as source:
            declared = [spec.name for spec in source.specs()]
            found = [pair[0] for pair in source]
        for index in range(max(len(declared), len(found))):
            said, gave = ("".join(names[index : index + 1]) for names in (declared, found))
            assert said == gave, (
                f"tensor {index}: specs() says {said or 'nothing'}, "
                f"the iterator gave {gave or 'nothing'}"
            )
        expected = set(self.expected())
        for name in sorted(expected.symmetric_difference(found)):
            where = "expected, and the iterator" if name in expected else "given, and expected()"
            raise AssertionError(f"{name} is {where} does not have it")

    def test_dtypes_and_shapes(self, tmp_path: Path) -> None:
        """They are the same in ``specs()``, in the payload and in ``expected()``."""
        expected = self.expected()
        with self._opened(tmp_path) as source:
            declared = {spec.name: spec for spec in source.specs()}
            for name, payload in source:
                said = declared.get(name)
                if said is None:
                    continue
                if isinstance(payload, torch.Tensor):
                    gave = TensorSpec(name, payload.dtype, tuple(payload.shape))
                    assert str(said) == str(gave), f"specs() says {said}, the iterator gave {gave}"
                if name in expected:
                    want = TensorSpec(name, expected[name].dtype, tuple(expected[name].shape))
                    assert str(said) == str(want), f"specs() says {said}, expected is {want}"

    def test_values(self, tmp_path: Path) -> None:
        """Every tensor has exactly the expected bits."""
        expected = self.expected()
        for item in self._record(tmp_path):
            want = expected.get(item.spec.name)
            spec = item.spec
            if want is not None and (want.dtype, tuple(want.shape)) == (spec.dtype, spec.shape):
                same_bytes(spec, item.data, bytes_of(want), "the source gives {}, expected is {}")

    def test_replay(self, tmp_path: Path) -> None:
        """A second iteration yields the same again."""
        with self._opened(tmp_path) as source:
            same_recordings(record(source), record(source), "{} the first time, {} the second time")

    def test_borrowed_memory(self, tmp_path: Path) -> None:
        """A payload that is copied and dropped at once is right: nobody has to keep it."""
        kept = self._record(tmp_path)
        dropped: list[Recorded] = []
        with self._opened(tmp_path) as source:
            declared = {spec.name: spec for spec in source.specs()}
            iterator = iter(source)
            for index, item in enumerate(kept):
                try:
                    dropped.append(recorded(index, next(iterator), declared))
                except Exception as error:
                    raise AssertionError(
                        f"{item.spec.name}: it comes if the tensor before it is kept, and not "
                        f"once that is dropped: {in_words(error)}"
                    ) from error
        same_recordings(kept, dropped, "{} while payloads are kept, {} once they are dropped")

    def test_one_at_a_time(self, tmp_path: Path) -> None:
        """It holds no tensor while it makes the next one, unless it keeps that for good."""
        with self._opened(tmp_path) as source:
            name = held_too_long(source)
        assert name is None, (
            f"{name}: the iterator still holds it while it makes the next one, so that there is "
            "memory for two: del it behind the yield"
        )

    def test_lasting(self, tmp_path: Path) -> None:
        """If it says that it is lasting, what it yields is as right at the end as when it came."""
        with self._opened(tmp_path) as source:
            if not source.lasting:
                return
            declared = {spec.name: spec for spec in source.specs()}
            whole: list[Recorded] = []
            pairs: list[object] = []
            for index, pair in enumerate(source):
                whole.append(recorded(index, pair, declared))
                pairs.append(pair)
            kept = [recorded(index, pair, declared) for index, pair in enumerate(pairs)]
        same_recordings(whole, kept, "{} when it came, {} at the end, and it says it is lasting")

    def test_deferred_tensors(self, tmp_path: Path) -> None:
        """Any part of one can be read, by several threads at once, after the iterator moved on."""
        whole = self._record(tmp_path)
        with self._opened(tmp_path) as source:
            iterator = iter(source)
            payloads = [payload for _, payload in islice(iterator, len(whole))]
            read_in_parts(whole, payloads)
            del iterator

    def test_early_close(self, tmp_path: Path) -> None:
        """An iterator that is closed half-way leaves no file and no thread, and the source works.

        What the source itself opens at the first iteration, to keep it until `close`, is its own.
        """
        whole = self._record(tmp_path)
        with self._opened(tmp_path) as source:
            half = max(len(whole) // 2, 1)
            abandon(source, half)
            before = held()
            for _ in range(ROUNDS):
                abandon(source, half)
            left = left_since(before)
            assert not left, (
                f"closed at {whole[half - 1].spec.name} {ROUNDS} times, an iterator leaves "
                f"{', '.join(left)}: {before} were held before, {held()} are now"
            )
            same_recordings(whole, record(source), "{} in a new source, {} after an early close")

    def test_close(self, tmp_path: Path) -> None:
        """``close()`` leaves no file and no thread of what opening and iterating took."""
        self._record(tmp_path)
        before = held()
        items = self._record(tmp_path)
        left = left_since(before)
        assert not left, (
            f"close(), after {items[-1].spec.name} as the last tensor, leaves {', '.join(left)}: "
            f"{before} were held before, {held()} are now"
        )

    def test_missing_target(self, tmp_path: Path) -> None:
        """What is not there is a `StreamerError` when it is opened, not later."""
        told: StreamerError | None = None
        specs: Sequence[TensorSpec] = ()
        try:
            with closing(self.make_missing(new_folder(tmp_path))) as source:
                specs = source.specs()
        except StreamerError as error:
            told = error
        except Exception as error:
            raise AssertionError(
                f"a missing target raises {in_words(error)}: raise streamer.SourceError that "
                "names it"
            ) from error
        assert told is not None, (
            "a missing target is opened as if it were there, with "
            f"{specs[0] if specs else 'no tensor'}: raise streamer.SourceError at the opening"
        )
        assert str(told).strip(), f"a missing target raises a {type(told).__name__} without a text"

    def test_entry_point(self, tmp_path: Path) -> None:
        """An installed distribution registers the source, and ``target`` opens the same weights."""
        registry = Registry()
        registry.load_entry_points()
        folder = new_folder(tmp_path)
        with closing(self.make_source(folder)) as source:
            target = self.target(folder)
            assert not isinstance(target, WeightSource), "target() must be what is opened"
            try:
                opened = registry.open(target, **self.options)
            except StreamerError as error:
                remedy = "install the plugin, with an entry point in the group streamer"
                hint = f" ({remedy})" if isinstance(error, PluginError) else ""
                raise AssertionError(f"{target!s:.200} does not open: {error}{hint}") from error
            with closing(opened):
                assert type(opened) is type(source), (
                    f"{target!s:.200} opens {kind_of(opened)}, make_source() {kind_of(source)}"
                )
                words = "make_source() has {}, and what target() names has {}"
                same_specs(source.specs(), opened.specs(), words)

    def test_broadcast_packed(self, tmp_path: Path) -> None:
        """What two workers receive in several chunks is what the source gives."""
        self._broadcast(tmp_path, packed=True)

    def test_broadcast_per_tensor(self, tmp_path: Path) -> None:
        """The same, one broadcast a tensor."""
        self._broadcast(tmp_path, packed=False)

    def _broadcast(self, tmp_path: Path, packed: bool) -> None:
        items = self._record(tmp_path)
        specs = [replace(item.spec, name=f"{at}") for at, item in enumerate(items)]
        small = max(sum(spec.nbytes for spec in specs) // 4, 1)
        mode = "packed" if packed else "per tensor"
        with self._opened(tmp_path) as source:
            try:
                workers = deliver(source, specs, packed=packed, buffer_size=small)
            except StreamerError as error:
                where = ", ".join(f"{at} is {item.spec.name}" for at, item in enumerate(items[:9]))
                raise AssertionError(f"{mode}: {error} ({where})") from error
        for worker in workers:
            for at, item in enumerate(items):
                same_bytes(item.spec, item.data, worker[f"{at}"], "{} sent, {} received, " + mode)

    @contextmanager
    def _opened(self, tmp_path: Path) -> Iterator[WeightSource]:
        with closing(self.make_source(new_folder(tmp_path))) as source:
            yield source

    def _record(self, tmp_path: Path) -> list[Recorded]:
        with self._opened(tmp_path) as source:
            return record(source)
