"""Devices: those of `conf/hardware/`, and this machine's own ceilings as `oneaxis plan --measure` found them.

Measured ceilings stand in `.oneaxis/ceilings.json` with the hardware and the date, for each number of threads; on other
hardware they are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from oneaxis.artifacts import read_json
from oneaxis.errors import UserError

FOLDER = Path("conf") / "hardware"
CEILINGS = Path(".oneaxis") / "ceilings.json"
HERE = "here"
IDENTITY = ("cpu", "cpus", "machine")
"""What of `oneaxis.stage.hardware()` makes a machine another one for a timing."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Device(BaseModel):
    """A file of `conf/hardware/`: what the vendor says of a device, or what was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["cpu", "gpu"] = "cpu"
    memory_bytes: Rate
    bandwidth_bytes_s: Rate
    """Of its memory."""
    peak_flops_s: dict[str, Rate]
    """By arithmetic: f32, bf16, fp8, int8 (there: OP/s); dense."""

    def peak(self, arithmetic: str) -> float:
        """FLOP/s of an arithmetic.

        Raises:
            UserError: the device has none.
        """
        if arithmetic not in self.peak_flops_s:
            raise UserError(f"{self.name}: no peak for {arithmetic}; allowed: {', '.join(sorted(self.peak_flops_s))}")
        return self.peak_flops_s[arithmetic]


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached with so many threads."""

    device: Device
    threads: int
    measured_at: str


def read_device(root: Path, name: str) -> Device:
    """A device by the name of its file.

    Raises:
        UserError: there is no such file, or it says something else than a device.
    """
    path = root / FOLDER / f"{name}.yaml"
    names = sorted(file.stem for file in (root / FOLDER).glob("*.yaml"))
    if name not in names:
        raise UserError(f"--hardware={name}: allowed: {', '.join([*names, HERE])}")
    try:
        return TypeAdapter(Device).validate_python(YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")))
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(f"{path}: {key}={problem['input']!r}: {problem['msg'].lower()}; allowed: name, memory_bytes, "
                        "bandwidth_bytes_s, peak_flops_s by arithmetic, numbers above 0") from error  # fmt: skip


def read_ceilings(root: Path, threads: int, hardware: Mapping[str, Any]) -> Ceilings:
    """This machine's own, as measured.

    Args:
        hardware: of this machine (`oneaxis.stage.hardware`).

    Raises:
        UserError: none were measured, on another machine, or with other threads.
    """
    path = root / CEILINGS
    if not path.is_file():
        raise UserError(f"{path}: this machine's ceilings are not measured; allowed: `oneaxis plan --measure` first, "
                        "or --hardware NAME")  # fmt: skip
    document = read_json(path)
    try:
        there = {key: document["hardware"][key] for key in IDENTITY}
        found = document["threads"]
        measured = {
            int(number): TypeAdapter(Device).validate_python(entry["device"]) for number, entry in found.items()
        }
        dates = {int(number): str(entry["measured_at"]) for number, entry in found.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not what `oneaxis plan --measure` writes; allowed: measure again") from error
    here = {key: hardware[key] for key in IDENTITY}
    if there != here:
        raise UserError(f"{path}: measured on {_words(there)}, and this is {_words(here)}; allowed: `oneaxis plan "
                        "--measure` here")  # fmt: skip
    if threads not in measured:
        raise UserError(f"{path}: measured with {', '.join(map(str, sorted(measured)))} threads, and {threads} are "
                        f"asked for; allowed: `oneaxis plan --measure --threads {threads}`")  # fmt: skip
    return Ceilings(measured[threads], threads, dates[threads])


def _words(identity: Mapping[str, Any]) -> str:
    return f"{identity['cpu']} ({identity['cpus']} CPUs, {identity['machine']})"
