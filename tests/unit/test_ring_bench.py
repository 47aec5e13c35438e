"""`launch.py bench ring`: what it measures and writes; how fast is for benchmarks/results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from benchmarks import commit

ROOT = Path(__file__).resolve().parents[2]


def test_bench_ring_writes_one_object_a_measurement(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    command = [sys.executable, str(ROOT / "launch.py"), "bench", "ring", "--quick", "--tokens=256"]
    done = subprocess.run(
        [*command, f"--json={file}"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = {(row["mode"], row.get("slots")): row for row in json.loads(file.read_text())}
    assert found["handoff", 12]["handoff_us"] > 0 and found["handoff", 64]["handoff_us"] > 0
    assert found["payload, sums off", 4]["ratio_to_memcpy"] > 0
    assert found["payload, sums on", 4]["memcpy_gb_per_s"] > 0
    assert found["wake-up", None]["p50_ms"] <= found["wake-up", None]["p99_ms"]
    assert found["reclaim", None]["max_s"] > 0
    assert 0 <= found["idle", None]["cpu_share"] <= 1
    assert all(row["bench"] == "ring" and row["cores"] > 0 for row in found.values())


def refused(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "launch.py"), "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["nothing", "stand_in", "../launch"])
def test_an_unknown_bench_is_refused_in_one_line(name: str) -> None:
    assert f"no bench '{name}': ring, target, drafter, pipeline" in refused(name)


def test_a_bench_explains_itself_and_launch_names_the_benches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: became.append(argv))
    for args in (["target", "--help"], ["drafter", "c.yaml", "-h"], ["--help"], ["-h"]):
        monkeypatch.setattr(sys, "argv", ["launch.py", "bench", *args])
        assert launch._main() == 0
    assert became == [
        [sys.executable, "-m", "benchmarks.target", "--help"],
        [sys.executable, "-m", "benchmarks.drafter", "c.yaml", "-h"],
    ]
    shown = capsys.readouterr().out
    assert shown.count(" bench [OPTIONS] {ring|target|drafter|pipeline}") == 2


def test_what_cannot_be_written_or_measured_is_refused_before_minutes_of_work() -> None:
    assert "--json: /no/x.json: no file in a" in refused("ring", "--json", "/no/x.json")
    assert "--timeline: /: no file" in refused("pipeline", "x.yaml", "--timeline", "/")
    assert "--seconds: 0: must be more than 0" in refused("pipeline", "x.yaml", "--seconds", "0")
    assert "--slots: 0: must be at least 1" in refused("target", "x.yaml", "--slots", "0")


def test_the_commit_is_this_checkout_s_wherever_the_bench_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "--quiet")
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    git(*name, "commit", "--quiet", "--allow-empty", "--message", "another project")
    monkeypatch.chdir(tmp_path)
    ours = None
    if (ROOT / ".git").exists():
        ours = git("-C", str(ROOT), "describe", "--always")
    found = commit()
    assert (found and found.removesuffix("-dirty")) == ours
