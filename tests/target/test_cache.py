"""The measurement cache: round trips, damage, sharing, and folders that cannot be written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rematplan.target.cache import Cache
from rematplan.target.measurement import Buffer, InstructionCost, Measurement, Source, Timeline, decode, encode


def measurement(**changes):
    return dataclasses.replace(
        Measurement(
            target="tpu-v5e",
            source=Source.COMPILED,
            peak_bytes=7,
            required_bytes=9,
            argument_bytes=1,
            output_bytes=2,
            temporary_bytes=4,
            cycles=5.0,
            fits_limit=True,
            sources={"seconds": "cycles"},
            timeline=Timeline((0, 3), (7, 5), 3, (Buffer(4, "temporary", "f32[1]", "blocks/0", "dot", "m.py:1 (f)"),)),
            warnings=("w",),
            costs=(InstructionCost("a", 2, None, 1e-6, (0.0, 1.5)), InstructionCost("c", 1, 9, 0.5)),
        ),
        **changes,
    )


def test_everything_survives_json():
    assert decode(json.loads(json.dumps(encode(measurement())))) == measurement()


def test_shown_json_leaves_costs_out():
    assert "costs" not in measurement().to_json()
    assert measurement().to_json()["source"] == "compiled"


def test_round_trip(tmp_path):
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.get("k") is None
    cache.put("k", measurement())
    assert cache.get("k") == measurement(cached=True)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["k.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "null", "[1]", "{}", '{"timeline": {}}', '{"timeline": null, "source": "run"}']
)
def test_damaged_entries_count_as_absent(tmp_path, content):
    cache = Cache(tmp_path)
    (tmp_path / "k.json").write_text(content)
    assert cache.get("k") is None
    cache.put("k", measurement())
    assert cache.get("k") is not None


def test_a_folder_that_cannot_be_written_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")  # not even root can make a folder below a file
    with pytest.warns(UserWarning, match="REMATPLAN_CACHE"):
        cache.put("k", measurement())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("k", measurement())
    assert cache.get("k") is None


def test_where_the_default_lies(monkeypatch, tmp_path):
    monkeypatch.delenv("REMATPLAN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.default().folder == tmp_path / "rematplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Cache.default().folder == Path.home() / ".cache" / "rematplan"
    monkeypatch.setenv("REMATPLAN_CACHE", str(tmp_path / "mine"))
    assert Cache.default().folder == tmp_path / "mine"
    monkeypatch.setenv("REMATPLAN_CACHE", "off")
    assert Cache.default().folder is None
    Cache.default().put("k", measurement())
    assert Cache.default().get("k") is None


WRITER = """
import sys
from pathlib import Path
from rematplan.target.cache import Cache
cache = Cache(Path(sys.argv[1]))
for _ in range(200):
    cache.write("k.json", {"who": sys.argv[2] * 2000})
    read = cache.read("k.json")
    assert read is not None and len(set(read["who"])) == 1, read
"""


def test_two_processes_share_a_folder(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), who]) for who in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


ENDLESS = """
import sys
from pathlib import Path
from rematplan.target.cache import Cache
cache, n = Cache(Path(sys.argv[1])), 0
print(flush=True)
while True:
    cache.write("k.json", {"who": str(n % 10) * 200_000})
    n += 1
"""


def test_a_writer_that_is_killed_leaves_whole_entries(tmp_path):
    cache = Cache(tmp_path)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            while cache.read("k.json") is None:
                pass
            writer.kill()
        assert len(set(cache.read("k.json")["who"])) == 1
        assert [path.name for path in tmp_path.glob("*.json")] == ["k.json"]  # what was half written is no entry


def test_entries_are_for_everyone_whom_the_user_lets_read(tmp_path):
    """A folder that several people share: the mode is that of any other new file."""
    Cache(tmp_path).put("k", measurement())
    (tmp_path / "other").write_text("")
    assert (tmp_path / "k.json").stat().st_mode == (tmp_path / "other").stat().st_mode
