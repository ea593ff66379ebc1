"""The folder through which weights come to a server: whose it is, and what is left in it."""

import tempfile
from pathlib import Path

import pytest
import torch

from qurl.rollout.handover import handover_folder, own_folder, weights_file


def test_folder_of_a_killed_server_is_removed_by_the_next():
    """Not by process numbers, which say nothing about another container with the same memory."""
    left = Path("/dev/shm/qurl-serve-left")
    left.mkdir(mode=0o700)
    broken = Path("/dev/shm/qurl-serve-broken")
    broken.symlink_to("/nowhere")
    try:
        with handover_folder(1000) as living, handover_folder(1000) as folder:
            assert folder.is_dir()
            assert not left.exists()
            assert living.is_dir()
        assert not folder.exists()
    finally:
        broken.unlink()


def test_where_there_is_no_room_in_memory_weights_go_through_files(caplog):
    with handover_folder(10**15) as folder:
        assert folder.parent == Path(tempfile.gettempdir())
    assert "updates go through files" in caplog.text


def test_only_a_servers_own_folder_is_written_to(tmp_path):
    """A trainer removes old weights there: not from a folder that somebody names it."""
    with handover_folder(1000) as folder:
        assert own_folder(folder) == folder
        folder.chmod(0o755)
        with pytest.raises(ValueError, match="is no folder that qurl serve has made"):
            own_folder(folder)
    named = tmp_path / "qurl-serve-x"
    named.mkdir(mode=0o700)
    link = Path("/dev/shm/qurl-serve-link")
    link.symlink_to(tmp_path)
    try:
        for other in (tmp_path, named, link, "/nowhere", ""):
            with pytest.raises(ValueError, match="is no folder that qurl serve has made"):
                own_folder(other)
    finally:
        link.unlink()
    keep = named / "model.safetensors"
    keep.touch()
    with weights_file(named, [("x", torch.zeros(2))]) as (name, _):
        assert sorted(file.name for file in named.iterdir()) == sorted([name, "model.safetensors"])
    assert [file.name for file in named.iterdir()] == ["model.safetensors"]
