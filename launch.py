"""The command line: plans, starts, watches and stops both halves; looks into a live ring.

    python launch.py run configs/smollm2_cpu.yaml
    python launch.py status --watch            (in another terminal)

Thin on purpose: every command is a few lines over launcher/. Imports no torch; `--help` and a
user's mistake answer at once. Exit codes of `run`: 0 done, 1 a half failed, 2 the user's mistake,
130/143 interrupted after a saved checkpoint; of `status`: 0 ok, 1 degraded, 2 broken, 3 nothing
there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Trains DFlash drafters: a frozen target and a drafter in two halves over a ring in "
    "shared memory.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ring = typer.Typer(help="Repair or remove a ring by hand.", no_args_is_help=True)
app.add_typer(ring, name="ring")

ConfigFile = Annotated[Path, typer.Argument(help="YAML file; see configs/.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values over the file's."),
]
RingOrRun = Annotated[
    str | None, typer.Argument(metavar="[RUN|RING]", help="Default: what runs here now.")
]


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None) -> int:
    """Print the resolved config and what it needs of this machine; start nothing."""
    from dflash.config import load_config
    from launcher.describe import plan_command

    return plan_command(load_config(config, overrides or []))


@app.command()
def run(config: ConfigFile, overrides: Overrides = None) -> int:
    """Train: start both halves, or resume the run of that name.

    The first Ctrl-C (or SIGTERM) saves and stops, the second stops now.
    """
    from dflash.config import load_config
    from launcher.session import run_command

    return run_command(load_config(config, overrides or []), sys.argv)


@app.command()
def status(
    what: RingOrRun = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again until the run ends.")] = False,
) -> int:
    """Look into a live ring, read-only. Exit code 0 ok, 1 degraded, 2 broken, 3 nothing there."""
    from launcher.status import status_command

    return status_command(what, as_json=as_json, watch=watch)


@app.command()
def stop(run_name: Annotated[str, typer.Argument(metavar="RUN")]) -> int:
    """Ask a run to save and stop, and wait until it has."""
    from launcher.stopping import stop_command

    return stop_command(run_name)


BENCHES = ("ring", "target", "drafter", "pipeline")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("eval", context_settings=PASS_ON)
def evaluate(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|EXPORT")],
) -> NoReturn:
    """Decode held-out prompts for real: tau, by position, speed, lossless check.

    Passes on: [--data FILE ...] [--prompts N] [--max-new-tokens N] [--tree N] [--temperature T]
    [--seed N] [--target MODEL] [--json FILE] [--again]; `python -m dflash.evaluate --help`
    explains them.
    """
    _become("dflash.evaluate", what, context.args)


@app.command(context_settings=PASS_ON)
def export(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT")],
) -> NoReturn:
    """Write the drafter in a serving layout: --to DIR [--format z-lab|speculators]."""
    _become("dflash.export", what, context.args)


def _become(module: str, what: str, args: list[str]) -> NoReturn:
    """Go on as `python -m module`: these two need torch, and this process must not."""
    from launcher.rundir import find_run
    from launcher.session import module_env

    found = find_run(what)
    path = str(found.path) if found is not None else what
    command = [sys.executable, "-m", module, path, *args]
    os.execve(sys.executable, command, {**os.environ, **module_env()})


@app.command(context_settings=PASS_ON | {"help_option_names": []})
def bench(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="ring|target|drafter|pipeline")],
) -> None:
    """Measure one part on this machine; --json FILE keeps the figures.

    Passes on the rest: `launch.py bench ring --help` explains it, and so on for each.
    """
    if what in ("-h", "--help"):
        print(context.get_help())
        return
    from launcher.rundir import ROOT
    from launcher.session import module_env

    if what not in BENCHES or not (ROOT / "benchmarks").is_dir():
        raise typer.BadParameter(f"no bench {what!r}: {', '.join(BENCHES)}, from a checkout")
    command = [sys.executable, "-m", f"benchmarks.{what}", *context.args]
    os.execve(sys.executable, command, {**os.environ, **module_env()})


@app.command()
def doctor() -> int:
    """Show machine, shared memory, GPUs and packages, and what dead runs have left."""
    from launcher.doctor import doctor_command
    from launcher.session import command_name

    return doctor_command(command_name())


@ring.command()
def destroy(
    what: RingOrRun = None,
    force: Annotated[bool, typer.Option("--force", help="Also when it is in use.")] = False,
) -> int:
    """Remove the ring of a dead run. Refuses while a process of the run lives."""
    from launcher.status import ring_path
    from shm_ring import destroy

    path = ring_path(what)
    destroy(path, force=force)
    print(f"removed {path}")
    return 0


@ring.command()
def reap(what: RingOrRun = None) -> int:
    """Take back now what dead processes held. Safe beside a live run, which does so itself."""
    from launcher.status import ring_path
    from shm_ring import reap

    path = ring_path(what)
    found = reap(path)
    waiting = f", {found.quarantined} in quarantine: reap again" if found.quarantined else ""
    print(f"{path}: {found.died} dead processes, {found.slots} slots changed{waiting}")
    return 0


@ring.command()
def drain(what: RingOrRun = None) -> int:
    """Empty the ring of a dead run, its poison too. Refuses while one of its processes lives."""
    from launcher.status import ring_path
    from shm_ring import drain

    path = ring_path(what)
    print(f"{path}: {drain(path)} slots emptied")
    return 0


@ring.command()
def dump(what: RingOrRun = None) -> int:
    """Print everything that stands in a ring's headers, as JSON."""
    import json

    from launcher.status import ring_path
    from shm_ring import snapshot

    print(json.dumps(snapshot(ring_path(what)).to_json(), indent=2))
    return 0


def main() -> NoReturn:
    sys.exit(_main())


def _main() -> int:
    try:
        return app(standalone_mode=False) or 0
    except typer.TyperException as error:  # usage: no such command, a missing argument
        text = error.format_message()
        return _complain(text if "\n" in text else f"{text} (see --help)", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        from dflash.config import ConfigError
        from shm_ring import LayoutMismatch, NoSpace, RingBusy, RingError

        if not isinstance(error, ConfigError | RingError):
            raise
        users = isinstance(error, ConfigError | RingBusy | NoSpace | LayoutMismatch)
        return _complain(str(error), 2 if users else 1)


def _complain(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
