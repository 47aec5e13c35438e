"""`doctor`: what it finds in shared memory, and that the command it names removes it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import doctor
from launcher.doctor import doctor_command
from launcher.rundir import ROOT
from shm_ring import RingWriter, create, destroy, hidden_state_fields

FIELDS = hidden_state_fields(
    max_tokens=16, max_docs=2, taps_width=4, hidden=4, dtype="f32", vlh=False
)


@pytest.fixture(autouse=True)
def shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory of our own in the place of /dev/shm."""
    monkeypatch.setattr(doctor, "SHM", tmp_path)
    monkeypatch.setattr(doctor, "SMALL_SHM", 0)
    monkeypatch.setattr(doctor, "disk_below", lambda path: None)
    return tmp_path


def test_a_healthy_machine_is_code_0(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command("dflash-ring") == 0
    out = capsys.readouterr().out
    assert not [line for line in out.splitlines() if line.startswith("!")]
    assert "posix_ipc" in out and f"{shm}: " in out


def test_a_living_ring_is_shown_and_no_trouble(
    shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(shm / "ring", FIELDS, 4, end_seq=1, run_name="r")
    party = RingWriter(shm / "ring", "target_0")
    assert doctor_command("dflash-ring") == 0
    assert f"ring {shm}/ring: run r, 1 processes alive" in capsys.readouterr().out
    party.leave()
    destroy(shm / "ring")


def test_the_command_named_for_a_dead_ring_removes_it(
    shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shm / "ring"
    code = f"from shm_ring import *; create({str(path)!r}, {FIELDS!r}, 4, end_seq=1, run_name='r')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert doctor_command(f"{sys.executable} {ROOT / 'launch.py'}") == 1
    (line,) = (li for li in capsys.readouterr().out.splitlines() if li.startswith("!"))
    assert "left by a dead process of run r" in line
    subprocess.run(shlex.split(line.rpartition(": ")[2]), check=True, capture_output=True)
    assert not path.exists()
    assert doctor_command("dflash-ring") == 0


def test_a_missing_package_is_trouble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("numpy", "no-such-package"))
    assert doctor_command("dflash-ring") == 1
    assert "! no-such-package is missing: pip install no-such-package" in capsys.readouterr().out


def test_a_small_shm_is_trouble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "SMALL_SHM", 1 << 60)
    assert doctor_command("dflash-ring") == 1
    assert "--shm-size" in capsys.readouterr().out


def test_a_shm_on_a_disk_is_trouble(
    shm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "disk_below", lambda path: "ext4" if path == shm else None)
    assert doctor_command("dflash-ring") == 1
    assert f"! {shm} is on ext4, not in memory" in capsys.readouterr().out
