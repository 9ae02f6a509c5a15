"""``streamer sources``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamer.hookspecs import Register, hookimpl
from streamer.registry import Registry


class Plugin:
    @hookimpl
    def streamer_register_sources(self, register: Register) -> None:
        register("mine", object, summary="weights of [bold]mine[/bold], " + "a long story " * 20)  # type: ignore[arg-type]


def test_in_a_pipe_a_source_is_one_whole_line(
    invoke: Callable[..., Any], registry: Registry
) -> None:
    registry.add(Plugin(), "my-plugin")
    ended = invoke("sources")
    assert (ended.code, ended.stderr) == (0, "")
    summary = "weights of [bold]mine[/bold], " + "a long story " * 20
    assert ended.stdout == f"mine\t{summary.strip()}\tmy-plugin\tin-process\n"


def test_a_broken_plugin_is_listed_and_takes_nothing_with_it(
    run: Callable[..., Any], install: Callable[[str, str], str]
) -> None:
    path = install("broken_one", "import no_such_library_anywhere\n")
    ended = run("sources", PYTHONPATH=path)
    assert (ended.code, ended.stderr) == (0, "")
    lines = [line.split("\t") for line in ended.stdout.splitlines()]
    assert ["safetensors", "streamer"] in [[line[2], line[3]] for line in lines]
    assert lines[-1] == [
        "!",
        "ModuleNotFoundError: No module named 'no_such_library_anywhere'",
        "broken_one",
        "dist-broken_one",
    ]


def test_on_a_terminal_it_is_a_table(
    on_terminal: Callable[..., Any], install: Callable[[str, str], str]
) -> None:
    path = install("broken_one", "import no_such_library_anywhere\n")
    ended = on_terminal("stdout", "sources", PYTHONPATH=path)
    assert (ended.code, ended.stderr) == (0, "")
    for text in ("scheme", "distribution", "safetensors://", "Broken plugins", "dist-broken_one"):
        assert text in ended.stdout
    assert "\t" not in ended.stdout
