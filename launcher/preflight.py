"""Before anything starts: what a run will need, and whether this machine has it.

    facts = Facts.gather(config, prepared)     # reads JSON files, free memory and nvidia-smi
    facts.refuse()                             # ConfigError, one line a problem, with what to set

`launch.py plan` prints the same facts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from dflash.arch import DrafterArch, TargetArch, has_fla, shipped_config
from dflash.config import Config, ConfigError
from dflash.prepare import Prepared, random_weights_warning
from shm_ring import Field, RingError, free_bytes, ring_bytes, snapshot

from .gpus import Gpu, Need, drafter_need, list_gpus, target_need
from .rings import LIVING, disk_below, user_of
from .screen import size
from .slot import slot_fields


@dataclass(frozen=True)
class Place:
    """A process of the run and where it computes."""

    name: str
    threads: int
    gpu: Gpu | None
    """None on CPU, and where the machine has none."""
    need: Need | None
    """Of GPU memory; None on CPU."""


@dataclass(frozen=True)
class Facts:
    config: Config
    target: TargetArch
    arch: DrafterArch
    prepared: Prepared | None
    fields: tuple[Field, ...]
    places: tuple[Place, ...]
    """target_0 .. target_{n-1}, then trainer_0."""
    free_tmpfs: int
    """Bytes that a new ring may take of its file system."""
    free_cgroup: int | None
    """Bytes until the cgroup's memory limit; None without one."""
    free_memory: int
    """Bytes of the machine's memory that are free or can be made so, as the kernel reports it: some
    virtual machines grow as they are used, so too few are only worth a warning."""

    @classmethod
    def gather(cls, config: Config, target_dir: Path, prepared: Prepared | None) -> Facts:
        """ConfigError where the target's config.json or the drafter it asks for is impossible."""
        target = TargetArch.read(target_dir)
        mask_token_id = prepared.mask_token_id if prepared is not None else 0
        arch = DrafterArch.build(config, target, mask_token_id)
        fields = slot_fields(config, arch)
        free_tmpfs, free_cgroup = free_bytes(config.ring.path)
        # A dead run's ring at this path makes room before the new one is made.
        left = _ring_there(config.ring.path)
        return cls(
            config=config,
            target=target,
            arch=arch,
            prepared=prepared,
            fields=fields,
            places=_places(config, target, arch, ring_bytes(fields, 1), _longest(prepared)),
            free_tmpfs=free_tmpfs + left,
            free_cgroup=None if free_cgroup is None else free_cgroup + left,
            free_memory=psutil.virtual_memory().available + left,
        )

    @property
    def ring_bytes(self) -> int:
        return ring_bytes(self.fields, self.config.ring.slots)

    @property
    def slot_bytes(self) -> int:
        return ring_bytes(self.fields, 2) - ring_bytes(self.fields, 1)

    def refuse(self) -> None:
        """ConfigError with every problem, one line each; nothing where there is none."""
        if problems := [*self._ring_problems(), *self._gpu_problems()]:
            raise ConfigError("\n".join(problems))

    def warnings(self) -> list[str]:
        """What is possible, but perhaps not meant."""
        config, lines = self.config, list[str]()
        if config.target.random_weights:
            lines.append(random_weights_warning(config))
        cores, threads = os.cpu_count() or 1, sum(place.threads for place in self.places)
        if threads > cores:
            lines.append(f"{threads} threads on {cores} cores (target.threads, drafter.threads)")
        data = self.prepared if config.data.random is None else None
        if data is not None and data.num_heldout < config.eval.prompts:
            lines.append(
                f"eval.prompts {config.eval.prompts}: only {data.num_heldout} "
                f"conversations are held out (data.heldout {config.data.heldout})"
            )
        if (user := user_of(config.ring.path)) is not None:
            lines.append(f"ring.path: {config.ring.path} is in use by run {user!r}")
        if (kind := disk_below(config.ring.path)) is not None:
            lines.append(
                f"ring.path: {config.ring.path} is on {kind}, not in memory: every slot is written "
                "to the disk too; set it to a directory inside /dev/shm"
            )
        if self.ring_bytes > self.free_memory:
            lines.append(
                f"ring.slots: the ring takes {size(self.ring_bytes)}, and the machine reports "
                f"{size(self.free_memory)} of memory left: {self._smaller_ring(self.free_memory)}"
            )
        if self.target.delta_layers and config.target.device == "cuda" and not has_fla():
            lines.append(
                f"{self.target.delta_layers} layers of the target are Gated DeltaNet and run many "
                "times slower without flash-linear-attention: pip install 'dflash-ring[gpu]'"
            )
        for gpu, need in _by_gpu(self.places):
            if need > gpu.total_bytes - gpu.used_bytes:
                lines.append(
                    f"GPU {gpu.index}: others use {size(gpu.used_bytes)} of "
                    f"{size(gpu.total_bytes)}, about {size(need)} are needed"
                )
        return lines

    def _ring_problems(self) -> list[str]:
        ring, problems = self.config.ring, []
        where = ring.path.parent
        for free, what, cure in (
            (self.free_tmpfs, f"{where} has", f"enlarge {where} (docker run --shm-size)"),
            (self.free_cgroup, "the memory limit leaves", "raise the limit (docker run --memory)"),
        ):
            if free is None or self.ring_bytes <= free:
                continue
            problems.append(
                f"ring.slots: {ring.slots} slots of {size(self.slot_bytes)} take "
                f"{size(self.ring_bytes)}, {what} {size(free)}: "
                f"{self._smaller_ring(free)}, or {cure}"
            )
        return problems

    def _smaller_ring(self, free: int) -> str:
        """The setting that fits into `free` bytes."""
        ring = self.config.ring
        fewest = 2 * self.config.targets + 2
        slots = (free - ring_bytes(self.fields, 0)) // self.slot_bytes
        if slots >= fewest:
            return f"set ring.slots to at most {slots}"
        # Whatever its length, each file of a slot may take one page more than its bytes.
        pages = 4096 * (len(self.fields) + 1)
        room = (free - ring_bytes(self.fields, 0)) / fewest - pages
        share = max(room, 0) / self.slot_bytes
        tokens = int(ring.max_tokens * share) // 16 * 16
        if not tokens:
            return f"not even {fewest} of the smallest fit: set ring.path to another tmpfs"
        return f"set ring.slots={fewest} and ring.max_tokens to at most {tokens}"

    def _gpu_problems(self) -> list[str]:
        config, problems = self.config, []
        devices = {"target": config.target.device, "drafter": config.drafter.device}
        for section, device in devices.items():
            if device == "cuda" and not any(place.gpu for place in self.places):
                problems.append(
                    f"{section}.device: cuda, but nvidia-smi shows no GPU here: "
                    f"set {section}.device=cpu"
                )
        for gpu, need in _by_gpu(self.places):
            if need > gpu.total_bytes:
                names = [place.name for place in self.places if place.gpu == gpu]
                problems.append(
                    f"GPU {gpu.index} ({gpu.name}) has {size(gpu.total_bytes)}, but "
                    f"{' and '.join(names)} need about {size(need)}: {self._smaller_step(gpu)}"
                )
        return problems

    def _smaller_step(self, gpu: Gpu) -> str:
        """The setting that fits onto the GPU: what grows with it is scaled down."""
        needs = [(p.name, p.need) for p in self.places if p.gpu == gpu and p.need is not None]
        # A target worker's activations go with its micro-batch, not with the slot.
        grows = sum(n.slots + (n.activations if name == "trainer_0" else 0) for name, n in needs)
        fixed = sum(need.total for _, need in needs) - grows
        if fixed >= gpu.total_bytes:
            return "the weights alone don't fit: another GPU, or a smaller target or drafter"
        share = 0.98 * (gpu.total_bytes - fixed) / grows
        tokens = int(self.config.ring.max_tokens * share) // 16 * 16
        return f"set ring.max_tokens to at most {tokens}"


def check_early(config: Config) -> None:
    """What needs no target: ConfigError before minutes go into preparing it."""
    if config.data.random is None and not config.data.path.is_file():
        raise ConfigError(f"data.path: {config.data.path}: no such file")
    on_gpu = config.target.device == "cuda"
    if on_gpu and not config.target.random_weights and not find_spec("accelerate"):
        raise ConfigError(
            "target.device: cuda: loading weights straight onto a GPU needs `accelerate`: "
            "pip install 'dflash-ring[gpu]'"
        )
    if not config.ring.path.parent.is_dir():
        raise ConfigError(f"ring.path: {config.ring.path.parent}: no such directory")
    ring = config.ring.path
    if ring.is_mount():
        raise ConfigError(
            f"ring.path: {ring} is a file system of its own: name a new directory inside it"
        )
    if ring.is_dir():
        foreign = any(ring.iterdir()) and not (ring / "meta.bin").exists()
    else:
        foreign = ring.exists()
    if foreign:
        raise ConfigError(
            f"ring.path: {ring} is there and is no ring: name a new directory inside a tmpfs"
        )


def refuse_early(config: Config) -> None:
    """The whole preflight, where the target's shapes are known before conversion or download."""
    model = config.target.model
    directory = Path(os.path.expanduser(model))  # noqa: PTH111 - this one never raises
    if not directory.is_dir():
        directory = shipped_config(model) or directory
    if (directory / "config.json").is_file():
        Facts.gather(config, directory, None).refuse()


def _places(
    config: Config, target: TargetArch, arch: DrafterArch, slot_bytes: int, longest: int
) -> tuple[Place, ...]:
    on_cuda = "cuda" in (config.target.device, config.drafter.device)
    gpus = list_gpus() if on_cuda else []
    for_targets = gpus
    if config.drafter.device == "cuda" and len(gpus) > 1:
        for_targets = gpus[:-1]  # the trainer's own is the last
    places = []
    for rank in range(config.targets):
        on_gpu = config.target.device == "cuda"
        gpu = for_targets[rank % len(for_targets)] if on_gpu and gpus else None
        need = target_need(config, target, slot_bytes, longest) if on_gpu else None
        places.append(Place(f"target_{rank}", config.target.threads, gpu, need))
    on_gpu = config.drafter.device == "cuda"
    need = drafter_need(config, target, arch, slot_bytes) if on_gpu else None
    gpu = gpus[-1] if on_gpu and gpus else None
    places.append(Place("trainer_0", config.drafter.threads, gpu, need))
    return tuple(places)


def _longest(prepared: Prepared | None) -> int:
    return 0 if prepared is None else prepared.length_quantiles[-1]


def _by_gpu(places: tuple[Place, ...]) -> list[tuple[Gpu, int]]:
    """Each used GPU with the bytes that its processes need together."""
    sums: dict[Gpu, int] = {}
    for place in places:
        if place.gpu is not None and place.need is not None:
            sums[place.gpu] = sums.get(place.gpu, 0) + place.need.total
    return list(sums.items())


def _ring_there(path: Path) -> int:
    """Bytes of the ring that a dead run left at `path`; 0 where there is none or it lives."""
    try:
        view = snapshot(path)
    except RingError:
        return 0
    if view.owner_alive or any(party.status in LIVING for party in view.parties):
        return 0
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
