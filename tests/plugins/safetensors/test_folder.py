"""Checkpoint folders and indexes: what is taken from where, and what is refused and why."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from streamer_safetensors import SafetensorsSource

from streamer import SourceError

INDEX = "model.safetensors.index.json"


def save(path: Path, *names: str) -> Path:
    """A file of one-element tensors; the value tells the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.tensor([float(len(path.name))]) for name in names}, path)
    return path


def save_index(path: Path, weight_map: object) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))
    return path


def origins(path: Path | str) -> dict[str, str]:
    """The file that each tensor is read from, in order."""
    with closing(SafetensorsSource(path)) as source:
        return {name: tensor.file.path.name for name, tensor in source}


def assert_one_line(error: SourceError) -> None:
    assert str(error).isprintable()


def in_order(message: str, *parts: str) -> None:
    position = 0
    for part in parts:
        found = message.find(part, position)
        assert found >= 0, f"{part!r} not after byte {position} of {message!r}"
        position = found + len(part)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "streamer")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors a and b in shard 2, c in shard 1, under an index in yet another order."""
    save(tmp_path / "model-00002-of-00002.safetensors", "a", "b")
    save(tmp_path / "model-00001-of-00002.safetensors", "c")
    save_index(
        tmp_path / INDEX,
        {
            "b": "model-00002-of-00002.safetensors",
            "c": "model-00001-of-00002.safetensors",
            "a": "model-00002-of-00002.safetensors",
        },
    )
    return tmp_path


class TestWhatIsTaken:
    def test_a_file(self, tmp_path):
        path = save(tmp_path / "any.name", "a")
        assert origins(path) == {"a": "any.name"}
        assert origins(str(path)) == {"a": "any.name"}

    def test_a_home_path(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        save(tmp_path / "m.safetensors", "a")
        assert origins("~/m.safetensors") == {"a": "m.safetensors"}

    def test_a_path_from_a_folder_that_is_left_later(self, tmp_path, monkeypatch):
        save(tmp_path / "m.safetensors", "a")
        monkeypatch.chdir(tmp_path)
        with closing(SafetensorsSource("m.safetensors")) as source:
            monkeypatch.chdir("/")
            assert [name for name, _ in source] == ["a"]

    def test_an_indexed_folder_in_the_order_of_the_shards(self, sharded):
        expected = {
            "c": "model-00001-of-00002.safetensors",
            "a": "model-00002-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
        assert origins(sharded) == expected
        assert list(origins(sharded)) == list(expected)
        assert origins(sharded / INDEX) == expected

    def test_an_index_of_another_name(self, sharded):
        (sharded / INDEX).rename(sharded / "model.fp16.safetensors.index.json")
        assert len(origins(sharded)) == 3

    def test_the_standard_index_wins(self, sharded):
        save_index(sharded / "a.safetensors.index.json", {"a": "nowhere.safetensors"})
        assert len(origins(sharded)) == 3

    def test_a_folder_without_index(self, tmp_path):
        save(tmp_path / "2.safetensors", "a")
        save(tmp_path / "1.safetensors", "b")
        save(tmp_path / "._1.safetensors", "c")
        (tmp_path / "config.json").write_text("{}")
        assert list(origins(tmp_path).items()) == [("b", "1.safetensors"), ("a", "2.safetensors")]

    def test_an_index_names_a_subfolder(self, tmp_path):
        save(tmp_path / "part" / "1.safetensors", "a")
        save_index(tmp_path / INDEX, {"a": "./part/1.safetensors"})
        assert origins(tmp_path) == {"a": "1.safetensors"}

    def test_a_hub_cache_of_links(self, tmp_path):
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        save(tmp_path / "blobs" / "0123", "a")
        save_index(tmp_path / "blobs" / "4567", {"a": "model-1.safetensors"})
        (snapshot / "model-1.safetensors").symlink_to("../../blobs/0123")
        (snapshot / INDEX).symlink_to("../../blobs/4567")
        assert origins(snapshot) == {"a": "model-1.safetensors"}


class TestTheIndexDecides:
    """Cases 19, 21 and 22."""

    def test_all_missing_shards_are_listed(self, sharded, refused):
        os.remove(sharded / "model-00001-of-00002.safetensors")
        os.remove(sharded / "model-00002-of-00002.safetensors")
        (sharded / "model-00002-of-00002.safetensors").symlink_to("../blobs/0123")
        in_order(
            refused(sharded),
            "2 of 2 shards",
            INDEX,
            "model-00001-of-00002.safetensors, ",
            "model-00002-of-00002.safetensors (a link to ../blobs/0123, which leads to no file)",
            "download or copy",
        )

    def test_many_missing_shards_are_all_listed(self, tmp_path, refused):
        shards = [f"model-{number:05}-of-00200.safetensors" for number in range(1, 201)]
        save_index(tmp_path / INDEX, {f"layer.{shard}": shard for shard in shards})
        in_order(refused(tmp_path), "200 of 200", *shards)

    def test_other_files_are_ignored(self, sharded, warnings):
        expected = origins(sharded)
        save(sharded / "consolidated.safetensors", "tok_embeddings.weight")
        assert origins(sharded) == expected
        assert warnings() == []
        save(sharded / "model.safetensors", "a")
        (sharded / "broken.safetensors").write_bytes(b"")
        assert origins(sharded) == expected
        (warning,) = warnings()
        in_order(warning, sharded.name, "ignored", "broken.safetensors, model.safetensors")

    def test_a_tensor_that_another_shard_holds_too(self, sharded):
        save(sharded / "model-00001-of-00002.safetensors", "c", "a", "unindexed")
        assert origins(sharded)["a"] == "model-00002-of-00002.safetensors"
        assert "unindexed" not in origins(sharded)

    def test_an_absent_tensor(self, sharded, refused):
        save(sharded / "model-00002-of-00002.safetensors", "x")
        message = refused(sharded / INDEX)
        in_order(message, "00002-of-00002.safetensors does not hold a and 1 more", INDEX)
        save(sharded / "model-00002-of-00002.safetensors", "b")
        assert "does not hold a, which" in refused(sharded / INDEX)

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "Expecting value"),
            (b'{"weight_map": {"a": "b.safet', "Unterminated string"),
            (b"\xff", "can't decode byte"),
            (b"[]", "no weight_map"),
            (b"{}", "no weight_map"),
            (b'{"weight_map": {}}', "no weight_map"),
            (b'{"weight_map": ["a"]}', "no weight_map"),
            (b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "a comes twice"),
            (b'{"weight_map": {"a": null}}', "gives a to no file"),
            (b'{"weight_map": {"a": ["1.safetensors"]}}', "gives a to no file"),
            (b'{"weight_map": {"a": ""}}', "gives a to no file"),
            (b'{"weight_map": {"a": "pytorch_model-1.bin"}}', "convert the checkpoint"),
            (b"[" * 100_000, "nested too deeply"),
            (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            (b"<!DOCTYPE html>", "HTML"),
        ],
    )
    def test_a_broken_index(self, tmp_path, refused, content, expected):
        save(tmp_path / "model.safetensors", "a")
        (tmp_path / INDEX).write_bytes(content)
        in_order(refused(tmp_path / INDEX), INDEX, expected)
        with pytest.raises(SourceError, match=INDEX):
            SafetensorsSource(tmp_path)

    def test_an_endless_index(self, tmp_path, refused):
        with (tmp_path / INDEX).open("wb") as file:
            file.truncate(100_000_001)
        in_order(refused(tmp_path / INDEX), "100000001 bytes", "100000000 are allowed")

    def test_several_indexes(self, sharded, refused):
        (sharded / INDEX).rename(sharded / "b.safetensors.index.json")
        save_index(sharded / "a.safetensors.index.json", {"a": "1.safetensors"})
        in_order(refused(sharded), "a.safetensors.index.json, b.safetensors.index.json", "name one")


class TestEntriesStayInTheFolder:
    """Case 24."""

    @pytest.mark.parametrize(
        "name",
        [
            "../outside.safetensors",
            "../../etc/passwd",
            "part/../../outside.safetensors",
            "{absolute}",
            "/etc/passwd",
            "link/outside.safetensors",
            "link/../inside.safetensors",
            "part/../inside.safetensors",
            "{absolute_inside}",
            "a\x00.safetensors",
            "a\n.safetensors",
            "\ud800.safetensors",
        ],
    )
    def test_refused(self, tmp_path, refused, name):
        outside = save(tmp_path / "outside.safetensors", "a")
        folder = tmp_path / "checkpoint"
        inside = save(folder / "inside.safetensors", "a")
        (folder / "part").mkdir()
        (folder / "link").symlink_to(tmp_path)
        name = name.format(absolute=outside, absolute_inside=inside)
        save_index(folder / INDEX, {"a": name})
        in_order(refused(folder / INDEX), INDEX, "gives a to", "refused")

    def test_a_link_to_the_folder_itself_is_no_way_out(self, tmp_path, sharded):
        link = tmp_path / "latest"
        link.symlink_to(sharded)
        assert len(origins(link)) == 3


class TestFoldersWithoutIndex:
    """Cases 23 and 25, and folders that hold no weights to read."""

    def test_one_tensor_in_two_files(self, tmp_path, refused):
        save(tmp_path / "1.safetensors", "x", "a")
        save(tmp_path / "2.safetensors", "a")
        message = refused(tmp_path)
        in_order(message, "tensor a is both in", "1.safetensors and in", "2.safetensors", "index")

    def test_shards_that_did_not_all_come(self, tmp_path, refused):
        save(tmp_path / "model-00001-of-00003.safetensors", "a")
        save(tmp_path / "model-00003-of-00003.safetensors", "b")
        in_order(refused(tmp_path), "2 of the 3 shards", "model-*-of-00003", "download")
        save(tmp_path / "model-00002-of-00003.safetensors", "c")
        assert list(origins(tmp_path)) == ["a", "c", "b"]

    def test_consolidated_weights_yield_to_others(self, tmp_path, warnings):
        save(tmp_path / "consolidated-00001-of-00002.safetensors", "a")
        save(tmp_path / "model.safetensors", "a")
        assert origins(tmp_path) == {"a": "model.safetensors"}
        assert warnings() == []

    def test_only_consolidated_weights_are_the_model(self, tmp_path):
        save(tmp_path / "consolidated.safetensors", "a")
        assert origins(tmp_path) == {"a": "consolidated.safetensors"}

    def test_an_adapter_beside_a_model(self, tmp_path, warnings):
        save(tmp_path / "model.safetensors", "a")
        save(tmp_path / "adapter_model.safetensors", "lora")
        save_index(tmp_path / "adapter_model.safetensors.index.json", {"lora": "x.safetensors"})
        assert origins(tmp_path) == {"a": "model.safetensors"}
        (warning,) = warnings()
        in_order(warning, tmp_path.name, "ignored", "adapter_model.safetensors")

    def test_an_adapter_beside_shards(self, sharded, warnings):
        save(sharded / "adapter_model.safetensors", "lora")
        assert "lora" not in origins(sharded)
        in_order(warnings()[0], "adapter_model.safetensors")

    def test_only_an_adapter(self, tmp_path, refused):
        path = save(tmp_path / "adapter_model.safetensors", "lora")
        in_order(refused(tmp_path), "only a LoRA adapter", path.name, "peft://")
        in_order(refused(path), "is a LoRA adapter", "peft://")

    def test_an_empty_folder(self, tmp_path, refused):
        in_order(refused(tmp_path), "holds no *.safetensors file; it is empty")

    def test_only_pytorch_files(self, tmp_path, refused):
        for name in ("pytorch_model-1.bin", "rank0.pt", "config.json"):
            (tmp_path / name).write_bytes(b"PK")
        in_order(refused(tmp_path), "PyTorch files", "pytorch_model-1.bin, rank0.pt", "convert")

    def test_only_other_files(self, tmp_path, refused):
        (tmp_path / "config.json").write_text("{}")
        in_order(refused(tmp_path), "holds no *.safetensors file, only config.json")

    def test_weights_in_subfolders(self, tmp_path, refused):
        save(tmp_path / "vae" / "diffusion.safetensors", "a")
        save(tmp_path / "unet" / "diffusion.safetensors", "a")
        (tmp_path / "scheduler").mkdir()
        (tmp_path / "training_args.bin").write_bytes(b"PK")
        in_order(refused(tmp_path), "its subfolders do, name one of them: unet, vae")


class TestWhatIsNoFile:
    """Cases 20 and 26."""

    def test_a_folder_named_like_a_file(self, tmp_path, refused):
        (tmp_path / "model.safetensors").mkdir()
        with pytest.raises(SourceError, match=r"model\.safetensors is a folder, not a file"):
            SafetensorsSource(tmp_path)
        in_order(refused(tmp_path / "model.safetensors"), "it is empty")

    def test_a_shard_that_is_a_folder(self, sharded):
        os.remove(sharded / "model-00001-of-00002.safetensors")
        (sharded / "model-00001-of-00002.safetensors").mkdir()
        with pytest.raises(SourceError, match=r"00001-of-00002\.safetensors is a folder"):
            SafetensorsSource(sharded)

    @pytest.mark.parametrize("target", ["../../blobs/0123", "other", "model.safetensors"])
    def test_a_link_that_leads_nowhere(self, tmp_path, refused, target):
        (tmp_path / "other").symlink_to("gone")
        (tmp_path / "model.safetensors").symlink_to(target)
        in_order(refused(tmp_path / "model.safetensors"), f"is a link to {target}, which leads")
        with pytest.raises(SourceError, match=f"is a link to {target}"):
            SafetensorsSource(tmp_path)

    def test_a_pipe_is_not_waited_for(self, tmp_path, refused):
        os.mkfifo(tmp_path / "model.safetensors")
        in_order(refused(tmp_path / "model.safetensors"), "is not a regular file")

    def test_a_path_that_is_not_there(self, tmp_path, refused):
        in_order(refused(tmp_path / "x.safetensors"), "x.safetensors: No such file")

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("", "no path given"),
            (b"x", "not a usable path: b'x'"),
            (3, "not a usable path: 3"),
            (None, "not a usable path: None"),
            ("~nobody-of-this-name/x", "not a usable path: '~nobody"),
            ("a\x00b", "embedded null"),
        ],
    )
    def test_what_is_no_path(self, path, expected):
        with pytest.raises(SourceError, match=expected) as caught:
            SafetensorsSource(path)
        assert str(caught.value).isprintable()

    def test_a_file_without_tensors(self, tmp_path, refused, write_raw):
        in_order(refused(write_raw(tmp_path / "m.safetensors", {})), "holds no tensors")


ENTRIES = st.sampled_from(
    ["1.safetensors", "./1.safetensors", "..", "/", "1.safetensors/x.safetensors", "d.safetensors"]
) | st.text(max_size=5).map(lambda text: f"{text}.safetensors")
VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | ENTRIES | st.sampled_from(["\ud800", "\x00", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


class TestHostileIndexes:
    @pytest.fixture(scope="module")
    @staticmethod
    def folder(tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("hostile")
        save(folder / "1.safetensors", "a", "b")
        (folder / "d.safetensors").mkdir()
        return folder

    @settings(
        max_examples=250, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(
        content=st.binary(max_size=50)
        | st.dictionaries(st.sampled_from("abc") | st.text(max_size=2), ENTRIES | VALUES).map(
            lambda weight_map: json.dumps({"weight_map": weight_map}).encode()
        )
        | VALUES.map(lambda value: json.dumps({"weight_map": value}).encode())
    )
    def test_only_our_errors(self, folder, content):
        (folder / INDEX).write_bytes(content)
        try:
            assert set(origins(folder)) <= {"a", "b"}
        except SourceError as error:
            assert_one_line(error)


@pytest.mark.parametrize(
    "name", ["base_model.model.a.lora_A.weight", "a.base_layer.weight", "b.modules_to_save.x"]
)
def test_a_model_with_an_adapters_names_is_refused(tmp_path, refused, name):
    """Case 32: as `save_file(model.state_dict())` of a PEFT model leaves it."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1), name: torch.ones(1)}, path)
    assert refused(path) == (
        f"tensor {name} in model.safetensors belongs to an adapter, which no server takes for "
        "weights: merge it first, or save the adapter and push it over its base: "
        "peft://ADAPTER?base=CHECKPOINT"
    )
