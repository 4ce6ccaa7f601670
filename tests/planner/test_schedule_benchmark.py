"""The benchmark of schedules: says what it skips, and replays what it finds."""

from __future__ import annotations

import json

from benchmarks import schedules


def test_skips_where_there_are_no_graphs(tmp_path, capsys):
    schedules.main(["--graphs", str(tmp_path / "nowhere")])
    assert capsys.readouterr().out.startswith("skipped: no graphs in")


def test_a_graph_that_is_there(tmp_path, capsys):
    # peak 20 bytes where node 4 is computed; the budget of 18 drops value 1, which node 5 reads, and brings it back
    nodes = [{"cost": c, "bytes": b} for c, b in zip((5, 1, 10, 10, 74, 100), (4, 4, 6, 6, 6, 1), strict=True)]
    edges = [[0, 1], [1, 2], [2, 3], [3, 4], [0, 5], [1, 5], [4, 5]]
    graph = {"nodes": nodes, "edges": edges, "peak_bytes": 20, "total_cost": 200}
    (tmp_path / "vgg16_b256.json").write_text(json.dumps(graph))
    schedules.main(["--graphs", str(tmp_path), "vgg16_b256", "rlg1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0][:6] == ["vgg16_b256", "0.9", "0.5000", "0.5000", "0.8889", "7"]
    assert rows[0][7] == "optimal"
    assert rows[1][:2] == ["rlg1", "skipped:"]
