"""The tensors of a checkpoint folder, each read when it is asked for, none kept and no file mapped.

safetensors' own reader maps a file, and every page that was touched counts as the process's memory for as long as the
mapping lives: a model larger than memory would fill it. Here a tensor is read into memory of its own.
Format: 8 bytes, the length N of the header (little-endian); N bytes of JSON, name -> dtype, shape, data_offsets; data.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneaxis.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the dtypes that checkpoints hold."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself."""
READ_BYTES = 1 << 30
"""One system call reads at most 2 GiB."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_tensors(folder: Path) -> dict[str, Place]:
    """Every tensor of a folder, by name: of the files that its index names, or of its one file, or of all there are.

    Raises:
        UserError: there is none, a shard is missing, a file is cut or broken, the index names a tensor that its file
            does not hold, or two files hold one name.
    """
    index = folder / INDEX
    if index.is_file():
        files, listed = _read_index(index)
    else:
        files, listed = _without_index(folder), None
    found: dict[str, Place] = {}
    for path in files:
        for name, place in read_header(path).items():
            if name in found:
                raise UserError(f"{folder}: {name} is both in {found[name].path.name} and in {path.name}; allowed: one")
            found[name] = place
    for name, file in (listed or {}).items():
        if name not in found or found[name].path.name != file:
            raise UserError(f"{index}: weight_map: {name} is not in {file}; allowed: an index of the tensors that the "
                            "files hold")  # fmt: skip
    return found


def _read_index(index: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that an index names, and tensor name -> file name."""
    allowed = "allowed: a JSON object whose weight_map gives each tensor's file"
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: not an index of safetensors ({type(error).__name__}); {allowed}") from error
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise UserError(f"{index}: weight_map is {str(listed)[:60]}; {allowed}")
    files = [index.parent / file for file in sorted(set(listed.values()))]
    for path in files:
        if path.parent != index.parent:
            raise UserError(f"{index}: weight_map names {path}; allowed: files of its own folder")
        if not path.is_file():
            count = sum(file == path.name for file in listed.values())
            raise UserError(f"{path}: missing, though {index.name} says that {count} tensors are in it; allowed: every "
                            "shard of the checkpoint in one folder")  # fmt: skip
    return files, listed


def _without_index(folder: Path) -> list[Path]:
    """The files of a folder that has no index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no *.safetensors; allowed: a folder with config.json, *.safetensors and a tokenizer"
        )
    for path in files:
        numbered = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)\.safetensors", path.name)
        for number in range(1, int(numbered[4]) + 1) if numbered else ():
            assert numbered is not None
            other = f"{numbered[1]}{number:0{len(numbered[2])}d}{numbered[3]}{numbered[4]}.safetensors"
            if not (folder / other).is_file():
                raise UserError(f"{folder / other}: missing, though {path.name} is there; allowed: every shard of the "
                                "checkpoint in one folder")  # fmt: skip
    return files


def read_header(path: Path) -> dict[str, Place]:
    """The tensors of one file, by name.

    Raises:
        UserError: the file is cut, or no safetensors file.
    """
    allowed = "allowed: a whole safetensors file; copy or download it again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(f"{path}: cut or no safetensors file: {size} bytes, the header alone should be "
                                f"{length}; {allowed}")  # fmt: skip
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        places = {name: _place(path, entry, 8 + length) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {type(error).__name__} {error}; {allowed}") from error
    for name, place in places.items():
        if place.offset + place.num_bytes > size:
            raise UserError(f"{path}: cut: {name} ends at byte {place.offset + place.num_bytes} of {size}; {allowed}")
    return places


def _place(path: Path, entry: dict[str, Any], start: int) -> Place:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']}")
    place = Place(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
    if place.num_bytes != entry["data_offsets"][1] - entry["data_offsets"][0] or place.offset < start:
        raise ValueError(f"data_offsets {entry['data_offsets']} for {entry['dtype']} {entry['shape']}")
    return place


def read_tensor(place: Place) -> Tensor:
    """One tensor, in the dtype that it is stored in."""
    raw = torch.empty(place.num_bytes, dtype=torch.uint8)
    with place.path.open("rb", buffering=0) as file:
        _read_into(file.fileno(), raw, place.offset, place.path)
    return raw.view(place.dtype).view(place.shape)


def read_rows(place: Place, rows: Iterable[int]) -> Tensor:
    """Some rows of a tensor, [num_rows, ...], in the dtype that it is stored in."""
    rows = list(rows)
    assert all(0 <= row < place.shape[0] for row in rows), f"rows of {place.shape}"
    row_bytes = place.num_bytes // place.shape[0]
    raw = torch.empty(len(rows), row_bytes, dtype=torch.uint8)
    with place.path.open("rb", buffering=0) as file:
        # Neighbours are read in one call.
        first = 0
        while first < len(rows):
            last = first + 1
            while last < len(rows) and rows[last] == rows[last - 1] + 1:
                last += 1
            _read_into(
                file.fileno(), raw[first:last].view(-1), place.offset + rows[first] * row_bytes, place.path
            )  # fmt: skip
            first = last
    return raw.view(place.dtype).view(len(rows), *place.shape[1:])


def _read_into(descriptor: int, raw: Tensor, offset: int, path: Path) -> None:
    memory = memoryview(raw.numpy())
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done : done + READ_BYTES]], offset + done)
        if count == 0:
            raise UserError(f"{path}: ends at byte {offset + done}; allowed: a file that nobody changes meanwhile")
        done += count


def require_finite(name: str, tensor: Tensor, where: Path | str) -> None:
    """Refuse, with a UserError, a tensor that holds a NaN or an infinity. `where`: the checkpoint, for the message."""
    if not tensor.numel() or not tensor.is_floating_point():
        return
    if tensor.dtype.itemsize == 1:  # FP8 has no arithmetic of its own
        tensor = tensor.to(torch.bfloat16)
    low, high = torch.aminmax(tensor)
    if not bool(low.isfinite() & high.isfinite()):
        wrong = int((~tensor.isfinite()).sum())
        raise UserError(f"{where}: {name} holds NaN or infinity in {wrong} of {tensor.numel()} values; allowed: a "
                        "checkpoint of finite weights")  # fmt: skip
