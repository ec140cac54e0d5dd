"""Write a checkpoint tensor by tensor: none is kept in memory, whatever the size of the whole.

Tensors go to a plain file as they come; when a shard is full its header is known, and the shard is copied together in
the order in which safetensors itself writes one (by dtype, the largest first, then by name: each tensor is aligned).
A checkpoint of one shard is `model.safetensors`, byte for byte as safetensors would write it, else
`model-00001-of-00003.safetensors` and so on with an index.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneaxis.artifacts import read_json, write_json
from oneaxis.checkpoint.tensors import DTYPES, INDEX, SINGLE

COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICEN[CS]E*")
"""Files of a checkpoint beside its weights."""
NOT_COPIED = ("config.json", INDEX, "recipe.json")
SHARD_BYTES = 5_000_000_000
"""As transformers and the hub had it for years: larger files load slower and are awkward to move."""
COPY_BYTES = 1 << 24

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
"""safetensors' own order of dtypes, small ones first."""


class CheckpointWriter:
    """A new checkpoint folder, made from another's files and tensors that are added one by one."""

    def __init__(self, policy: Path, out: Path, shard_bytes: int = SHARD_BYTES):
        """Make the folder `out`; `policy` gives the tokenizer, the config and what else stands beside the weights."""
        self.policy, self.out, self.shard_bytes = policy, out, shard_bytes
        out.mkdir()
        self._raw = out / "tensors.partial"
        self._pending: dict[str, tuple[torch.dtype, list[int], int]] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._written: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, in its dtype; a new shard begins when this one would grow beyond `shard_bytes`."""
        assert name not in self._written, f"{name} is added twice"
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        if self._pending and self._pending_bytes + len(raw) > self.shard_bytes:
            self._close_shard()
        with self._raw.open("ab") as file:
            file.write(memoryview(raw))
        self._pending[name] = (tensor.dtype, list(tensor.shape), self._pending_bytes)
        self._pending_bytes += len(raw)
        self._written.add(name)

    def finish(self, quantization_config: dict[str, Any] | None, recipe: dict[str, Any]) -> None:
        """Write what remains: the last shard, the index, config.json, the policy's other files, recipe.json.

        Args:
            quantization_config: what config.json says of the quantisation; None: nothing.
            recipe: the settings that made this checkpoint, for who finds it alone.
        """
        self._close_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._partial(number).rename(self.out / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            total = {"total_size": self._total_bytes}
            write_json(self.out / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
        for path in sorted({path for pattern in COPIED for path in self.policy.glob(pattern) if path.is_file()}):
            if path.name not in NOT_COPIED:
                shutil.copyfile(path, self.out / path.name)
        config = read_json(self.policy / "config.json")
        if quantization_config is not None:
            config["quantization_config"] = quantization_config
        write_json(self.out / "config.json", config)
        write_json(self.out / "recipe.json", recipe)
        for path in self.out.iterdir():
            path.chmod(0o644)

    def _partial(self, number: int) -> Path:
        return self.out / f"shard-{number}.partial"

    def _close_shard(self) -> None:
        """Copy the pending tensors to a safetensors file, in its order."""
        assert self._pending, "a checkpoint without tensors"
        names = sorted(self._pending, key=lambda name: (-_ORDER.index(_NAMES[self._pending[name][0]]), name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            dtype, shape, _ = self._pending[name]
            start, end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._shards.append(names)
        with self._raw.open("rb") as source, self._partial(len(self._shards)).open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                dtype, shape, offset = self._pending[name]
                source.seek(offset)
                left = dtype.itemsize * math.prod(shape)
                while left:
                    piece = source.read(min(left, COPY_BYTES))
                    target.write(piece)
                    left -= len(piece)
        self._raw.unlink()
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0
