"""The Spin model of the ring (ring.pml): it says what protocol.py does, full searches of it pass,
and each rule that is taken out of it makes it fail.

Needs Debian's `spin` and gcc. In CI a missing one is a failure, elsewhere a skip.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from shm_ring import protocol

HERE = Path(__file__).parent
MODEL = "".join((HERE / name).read_text() for name in ("ring.pml", "protocol.pml"))

BASE = "NS=2 NP=2 NC=1 TEND=2 TI=2 PC=1"
RANKS = "NS=2 NP=2 NC=2 TEND=1 TI=2 PC=0"
# The halves end by themselves at the third failure of one seq, and the next run finishes.
POISON = "NS=2 NP=1 NC=1 TEND=2 TI=2 PC=0 MAXF=3 FAULTS=3 RERUN=1 ALONE"
# Everybody is killed anywhere, the starter of the next run too.
WHOLE = "NS=2 NP=1 NC=1 TEND=2 TI=2 PC=0 MAXF=2 FAULTS=1 RERUN=1 KILLS=1 SC=1"

SEARCHES = {
    "a worker and a trainer die anywhere": (BASE, 600_000),
    "a finished run is started again": (f"{BASE} RERUN=1", 900_000),
    "three failures, then a new run": (POISON, 15_000),
    "a death is a failure too": (
        "NS=2 NP=2 NC=1 TEND=1 TI=2 PC=1 MAXF=2 FAULTS=1 RERUN=1 ALONE",
        150_000,
    ),
    "a run dies whole, then a new run": (WHOLE, 700_000),
    "two workers die whole, then a new run": (
        "NS=2 NP=2 NC=1 TEND=1 TI=2 PC=0 RERUN=1 KILLS=1",
        150_000,
    ),
}
SLOW_SEARCHES = {
    "each store is a step of its own": (f"{BASE} FINE", 2_700_000),
    "ranks take the records of the dead": (f"{RANKS} REUSE", 400_000),
    "two workers die whole with failures": (WHOLE.replace("NP=1", "NP=2"), 14_000_000),
    "three failures, deaths among them": (f"{BASE} MAXF=3 FAULTS=1", 3_000_000),
    "the same, both halves end by themselves": (
        f"{BASE} MAXF=3 FAULTS=2 RERUN=1 ALONE",
        2_400_000,
    ),
    "old ranks live on beside the new": (f"{RANKS} OVERLAP", 9_000_000),
}
DEADLOCK = "invalid end state"
OWNER, TORN, GAP, COUNT = "own[s]==me", "hi[s]==want", "sq[s]==auxnext", "real["

# A rule taken away: what then happens, in which configuration.
MUTANTS = {
    "NO_RELEASE": (BASE, DEADLOCK),  # CTRL stays locked at a death
    "HEARTBEAT": (BASE, OWNER),  # a slot is taken from a living party
    "FLAG_FIRST": (BASE, TORN),  # READY before the data is whole
    "NO_QUARANTINE": (BASE, TORN),  # the slot of a dead producer is used again at once
    "HEAD_FIRST": (BASE, GAP),  # head is stored before the WRITING word
    "NO_DERIVE": (BASE, GAP),  # the next holder of CTRL does not derive head
    "EMPTY_WRITING": (BASE, OWNER),  # a rewind empties WRITING slots
    "EMPTY_READING": (f"{RANKS} OVERLAP", OWNER),  # a rewind empties READING slots
    "REDO_FRESH": (BASE, DEADLOCK),  # a REDO slot is claimed with a fresh seq
    "EXIT_EARLY": (BASE, DEADLOCK),  # a producer leaves after the last seq
    "STALE_PUBLISH": (BASE, DEADLOCK),  # an old epoch is published
    "ANY_EPOCH": (BASE, DEADLOCK),  # head is derived from slots of any epoch
    "HEAD_KEPT": (BASE, DEADLOCK),  # a rewind does not set head
    "NO_CLAIM_EPOCH": (BASE, GAP),  # the slot's epoch is written by publish, not by claim
    "NO_MARK": (BASE, GAP),  # no `settled`: a slot of an old epoch is the sign of a rewind
    "NO_MARK2": (BASE, GAP),  # the same, counting held slots too
    "OWN_FINISH": (BASE, GAP),  # only the rewinder finishes its rewind
    "EPOCH_FIRST": ("NS=2 NP=2 NC=1 TEND=2 TI=3 PC=0", GAP),  # the epoch before base_seq
    "REUSE": (f"{RANKS} REUSE", DEADLOCK),  # a party record is reused while a slot names it
    "ABORT_EARLY": (f"{BASE} FAULTS=1", TORN),  # an abort does not wait for its copy
    "CLOSED_KEPT": (f"{BASE} RERUN=1", DEADLOCK),  # a new run finds the old one's `closed`
    "TAKEOVER_KEEPS": (POISON, "st[0]==7"),  # a new run without a new epoch
    "DEAF_P": (POISON, DEADLOCK),  # target workers do not look for POISON
    "DEAF_C": (POISON, DEADLOCK),  # trainers do not
    "FAILS_KEPT": (POISON, COUNT),  # a fresh claim inherits failures
    "COUNT_TWICE": (WHOLE, COUNT),  # a failure that a death interrupts counts twice
}
SLOW_MUTANTS = {
    "OVERLAP0": (RANKS, DEADLOCK),  # a new group starts while rank 0 of the old one lives
}


@dataclass(frozen=True)
class Search:
    errors: int
    states: int
    complete: bool
    first_error: str


def search(directory: Path, sizes: str, optimise: str = "-O0") -> Search:
    """A full search of the model with these sizes and switches.."""
    directory.mkdir()
    spin = ["spin", "-a", *(f"-D{word}" for word in sizes.split()), str(HERE / "ring.pml")]
    subprocess.run(spin, cwd=directory, check=True, capture_output=True)
    flags = "-w -DSAFETY -DCOLLAPSE -DVECTORSZ=1024 -DMEMLIM=16000"
    gcc = ["gcc", optimise, *flags.split(), "-o", "pan", "pan.c"]
    subprocess.run(gcc, cwd=directory, check=True)
    done = subprocess.run(["./pan", "-m5000000"], cwd=directory, capture_output=True, text=True)
    text = done.stdout
    errors, states = re.search(r"errors: (\d+)", text), re.search(r"(\d+) states, stored\n", text)
    assert errors and states, text
    first = re.search(r"pan:1: (.*) \(at depth", text)
    complete = "not completed" not in text and "too small" not in text
    return Search(int(errors[1]), int(states[1]), complete, first[1] if first else "")


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def spin() -> None:
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if missing:
        text = f"{' and '.join(missing)} not installed: apt-get install spin gcc"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)


Found = dict[str, Future[Search]]


@pytest.fixture(scope="module")
def found(
    spin: None,
    pool: ThreadPoolExecutor,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """The quick searches of the tests that were chosen, two at a time; a test waits for its own."""
    top = tmp_path_factory.mktemp("model")
    whole = {name: sizes for name, (sizes, _) in SEARCHES.items()}
    broken = {name: f"{sizes} M_{name}" for name, (sizes, _) in MUTANTS.items()}
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return {
        name: pool.submit(search, top / str(index), sizes)
        for index, (name, sizes) in enumerate((whole | broken).items())
        if name in chosen
    }


@pytest.mark.timeout(900)  # it waits for those before it
@pytest.mark.parametrize("name", SEARCHES)
def test_a_full_search_finds_no_error(name: str, found: Found) -> None:
    result = found[name].result()
    assert (result.errors, result.complete, result.first_error) == (0, True, "")
    assert result.states >= SEARCHES[name][1]


def test_the_full_searches_are_two_million_states() -> None:
    assert sum(states for _, states in SEARCHES.values()) >= 2_000_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_without_this_rule_the_search_fails(name: str, found: Found) -> None:
    result = found[name].result()
    assert result.errors == 1
    assert MUTANTS[name][1] in result.first_error


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SLOW_SEARCHES)
def test_a_large_full_search_finds_no_error(name: str, spin: None, tmp_path: Path) -> None:
    sizes, least = SLOW_SEARCHES[name]
    result = search(tmp_path / "model", sizes, "-O1")
    assert (result.errors, result.complete, result.first_error) == (0, True, "")
    assert result.states >= least


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_MUTANTS)
def test_without_this_rule_a_large_search_fails(name: str, spin: None, tmp_path: Path) -> None:
    sizes, expected = SLOW_MUTANTS[name]
    result = search(tmp_path / "model", f"{sizes} M_{name}")
    assert result.errors == 1
    assert expected in result.first_error


def test_every_mutant_of_the_model_is_searched() -> None:
    assert set(re.findall(r"M_([A-Z]\w+)", MODEL)) - {"NAME"} == {*MUTANTS, *SLOW_MUTANTS}


def test_the_model_names_each_function_of_the_protocol_and_no_other() -> None:
    named = set(re.findall(r"protocol\.([a-z_]+)", MODEL)) - {"py", "pml"}
    functions = inspect.getmembers(protocol, inspect.isfunction)
    own = {name for name, f in functions if f.__module__ == protocol.__name__}
    assert named == {name for name in own if not name.startswith("_")}


def test_the_protocol_names_inlines_and_macros_of_the_model() -> None:
    source = inspect.getsource(protocol)
    named = set(re.findall(r"[Tt]he model's ([A-Z]+)", source))
    there = set(re.findall(r"^(?:inline|#define) ([A-Z]+)\(", MODEL, re.MULTILINE))
    assert named and named <= there
