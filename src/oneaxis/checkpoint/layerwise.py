"""A checkpoint run one decoder layer at a time, so that a model larger than memory can be measured and quantised.

In memory are: the tensors outside the layers that are small (norms, positions), one layer in float32, and the hidden
states of all sequences. The rows of the embedding that a text needs, and pieces of the output head, are read when used.
What each layer is called with (mask, rotary embedding, positions) comes from the model's own forward, in which layers
are replaced by recorders: so every family gets what it asks for, sliding and full attention apart.
What is computed equals the whole model in float32; a quantised checkpoint is computed as `oneaxis.checkpoint.load`
does it.

Dims: S sequences, B of them in a batch, T tokens, D hidden size, C channels of a linear's input, V vocabulary, N rows,
K key/value heads, H size of a head.
"""

import copy
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from oneaxis.checkpoint.compressed import Scheme, read_scheme
from oneaxis.checkpoint.load import PARTS, linear_of, load_tokenizer, read_config, stored_shapes
from oneaxis.checkpoint.problems import first_line, other_shape, require_whole
from oneaxis.checkpoint.tensors import Place, find_tensors, read_rows, read_tensor, require_finite
from oneaxis.errors import UserError
from oneaxis.quantize.experts import split_experts
from oneaxis.quantize.families import Decoder, Site, check_layer, decoder
from oneaxis.quantize.kv import ATTENTION, SCALES, RoundKV, attention_of, kv_rounding

See = Callable[[str, Tensor], None]
"""Called with a tensor's name and its values, [B, T, C]."""
HEAD_ROWS = 4096
"""Rows of the output head that are in memory at once."""
HIGH = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of what is not quantised."""
OFTEN_LEFT_OVER = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of tensors that older checkpoints hold and that no model reads."""


class _Recorder(nn.Module):
    """Stands in for a decoder layer: keeps what it is called with, and answers with `answer` or its input."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)
        self.hidden_BTD: Tensor | None = None
        self.answer_BTD: Tensor | None = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.hidden_BTD, self.arguments = hidden_BTD, (args, kwargs)
        return hidden_BTD if self.answer_BTD is None else self.answer_BTD


@dataclass
class Hidden:
    """Hidden states between two layers."""

    states_STD: Tensor
    """Of the dtype that layers compute in; `advance` writes each layer's output over its input."""
    batch_size: int
    arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]
    """Number of sequences in a batch -> what each layer is called with beside the hidden states."""

    def batches(self) -> Iterator[Tensor]:
        """Views of the states, [B, T, D]."""
        yield from self.states_STD.split(self.batch_size)

    def clone(self) -> "Hidden":
        """A copy that can be advanced for itself."""
        return Hidden(self.states_STD.clone(), self.batch_size, self.arguments)


class Layerwise:
    """A checkpoint folder, plain or as `oneaxis.quantize` writes it, that runs layer by layer."""

    def __init__(self, folder: Path, model: PreTrainedModel, family: Decoder, scheme: Scheme, places: dict[str, Place]):
        self.folder = folder
        self.config: PretrainedConfig = model.config
        self.decoder = family
        self.scheme = scheme
        self._places = places
        self._model = model
        parent, _, leaf = family.layers_path.rpartition(".")
        backbone = model.get_submodule(parent)
        self._layers: list[nn.Module] = list(getattr(backbone, leaf))
        self._recorders = [_Recorder(layer) for layer in self._layers]
        setattr(backbone, leaf, nn.ModuleList(self._recorders))
        self._embedding = model.get_input_embeddings()
        embedding = next(name for name, module in model.named_modules() if module is self._embedding)
        tied = model.all_tied_weights_keys or {}
        self._embedding_name, self._head_name = f"{embedding}.weight", tied.get("lm_head.weight", "lm_head.weight")

    @classmethod
    def open(cls, folder: Path, *, plain: bool = False) -> Self:
        """Read what is where, and check that the tensors are those of the model; no weight is read yet.

        Args:
            folder: config.json, *.safetensors, tokenizer. plain: refuse a checkpoint that is quantised.

        Raises:
            UserError: the model's family is not supported, a file is missing or broken, a tensor is missing, unknown or
                of another shape, or the checkpoint is quantised in a way that is not asked for.
        """
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: no config.json; allowed: a folder with config.json, *.safetensors and a tokenizer"
            )
        config, quantization = read_config(folder)
        if plain and quantization is not None:
            kind = " ".join(str(quantization[key]) for key in ("quant_method", "format") if quantization.get(key))
            raise UserError(f"{folder}: is quantised already ({kind or 'quantization_config in config.json'}); "
                            "allowed: an unquantised checkpoint, such as the base model")  # fmt: skip
        family = decoder(config)
        scheme = Scheme("none") if quantization is None else read_scheme(quantization, str(folder / "config.json"))
        places = find_tensors(folder)
        model = _on_meta(folder, config)
        layers = model.get_submodule(family.layers_path)
        for index, layer in enumerate(layers):
            check_layer(family, index, split_experts(layer))
        places = _with_prefix(places, model.base_model_prefix)
        require_whole(str(folder), _misfits(model, family, scheme, places))
        found = cls(folder, model, family, scheme, places)
        found._read_outside()
        return found

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._places)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.folder)

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the checkpoint's norm weights: what is not quantised is stored in it again."""
        for site in self.decoder.sites(0):
            if site.kind == "qkv" and site.producer is not None:
                return self._places[f"{self.decoder.stored_name(0, site.producer.name)}.weight"].dtype
        return self._places[self._embedding_name].dtype

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises:
            UserError: it holds a NaN or an infinity.
        """
        tensor = read_tensor(self._places[name])
        require_finite(name, tensor, self.folder)
        return tensor

    # --- running ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def layer(self, index: int) -> nn.Module:
        """One decoder layer in float32, its experts split, quantised linears in place, for `advance`; read anew.

        Raises:
            UserError: a tensor of it holds a NaN or an infinity.
        """
        give_back()
        # The configuration is shared, not copied: it says how attention is computed.
        layer = copy.deepcopy(self._layers[index], {id(self.config): self.config})
        for name in self.decoder.linears(index):
            stored = self.decoder.stored_name(index, name)
            if _is_quantized(stored, self.scheme, self._places):
                parts = {part: self.tensor(f"{stored}.{part}") for part in PARTS if f"{stored}.{part}" in self._places}
                plain: Any = layer.get_submodule(name)
                sizes = {"out_features": plain.out_features, "in_features": plain.in_features}
                layer.set_submodule(name, linear_of(self.scheme, stored, parts, **sizes, where=str(self.folder)))
        if self.scheme.kv == "fp8":
            scales = {part: self.tensor(name) for part, name in kv_scale_names(self.decoder, index, layer).items()}
            attention_of(layer).kv_functions = [kv_rounding(scales)]  # type: ignore[assignment]
        tensors = {}
        for name in (name for name, tensor in layer.state_dict().items() if tensor.is_meta):
            tensor = self.tensor(self.decoder.stored_name(index, name)).float()
            tensors[name] = tensor.t().contiguous() if self.decoder.transposed(index, name) else tensor
        layer.load_state_dict(tensors, strict=False, assign=True)
        assert not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())), f"layer {index}"
        return layer.eval().requires_grad_(False)

    @torch.no_grad()
    def start(self, token_ids_ST: Tensor, batch_size: int, dtype: torch.dtype = torch.float32) -> Hidden:
        """The hidden states before the first layer, for layers that compute in `dtype`."""
        unique, places_ST = token_ids_ST.unique(return_inverse=True)
        place = self._places[self._embedding_name]
        assert int(unique[-1]) < place.shape[0], f"token id {int(unique[-1])} of {place.shape[0]}"
        rows_UD = read_rows(place, unique.tolist()).float()
        require_finite(self._embedding_name, rows_UD, self.folder)
        whole = self._embedding.weight
        self._embedding.weight = nn.Parameter(rows_UD, requires_grad=False)
        states_STD: Tensor | None = None
        arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        try:
            for start in range(0, len(places_ST), batch_size):
                self._run_outside(self._embedding(places_ST[start : start + batch_size]))
                hidden_BTD = self._recorders[0].hidden_BTD
                assert hidden_BTD is not None
                if states_STD is None:
                    states_STD = torch.empty(*token_ids_ST.shape, hidden_BTD.shape[-1], dtype=dtype)
                states_STD[start : start + batch_size] = hidden_BTD
                called_with = [recorder.arguments for recorder in self._recorders]
                arguments.setdefault(len(hidden_BTD), _in_dtype(called_with, dtype))
                self._forget()
        finally:
            self._embedding.weight = whole
        assert states_STD is not None
        return Hidden(states_STD, batch_size, arguments)

    @torch.no_grad()
    def advance(
        self,
        hidden: Hidden,
        index: int,
        layer: nn.Module,
        see: See | None = None,
        *,
        watch_kv: bool = False,
        round_kv: RoundKV | None = None,
    ) -> None:
        """Run one layer over all sequences; its output takes the place of its input in `hidden`.

        Args:
            index: the layer's number. layer: what `layer(index)` gave, changed or not.
            see: called for every batch with each site's name and tensor, [B, T, C]. An expert's site gets the tokens
                that were routed to it, [1, n, C], and no call if there are none.
            watch_kv: `see` also gets "k" and "v", after rotary and before rounding, [B, T, K * H].
            round_kv: what a cache makes of keys and values.
        """
        functions: list[RoundKV] = []
        if see is not None and watch_kv:
            functions.append(_seeing_kv(see))
        if round_kv is not None:
            functions.append(round_kv)
        with watching(layer, self.decoder.sites(index), see, hidden.states_STD.shape[1]), _with_kv(layer, functions):
            for states_BTD in hidden.batches():
                args, kwargs = hidden.arguments[len(states_BTD)][index]
                output = layer(states_BTD, *args, **kwargs)
                states_BTD.copy_(output[0] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def outputs(self, hidden: Hidden) -> Tensor:
        """The hidden states after the final norm, [S, T, D], float32. `hidden` is used up: they take its place."""
        outputs_STD = hidden.states_STD
        for start, states_BTD in zip(
            range(0, len(outputs_STD), hidden.batch_size), hidden.batches(), strict=True
        ):  # fmt: skip
            self._recorders[-1].answer_BTD = states_BTD
            shape = (*states_BTD.shape[:2], self._places[self._embedding_name].shape[1])
            final_BTD = self._run_outside(torch.zeros(1).expand(shape))
            self._forget()
            if final_BTD.shape[-1] != outputs_STD.shape[-1]:  # OPT may project out of its hidden size
                outputs_STD = final_BTD.new_empty(*outputs_STD.shape[:2], final_BTD.shape[-1])
            outputs_STD[start : start + hidden.batch_size] = final_BTD
        return outputs_STD

    @torch.no_grad()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The output head on some rows of `outputs`, [N, V], soft-capped where the family caps."""
        place = self._places[self._head_name]
        logits_NV = torch.empty(len(hidden_ND), place.shape[0])
        for first in range(0, place.shape[0], HEAD_ROWS):
            rows_RD = read_rows(place, range(first, min(first + HEAD_ROWS, place.shape[0]))).float()
            require_finite(self._head_name, rows_RD, self.folder)
            torch.mm(hidden_ND, rows_RD.T, out=logits_NV[:, first : first + len(rows_RD)])
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits_NV if cap is None else logits_NV.div_(cap).tanh_().mul_(cap)

    def run(
        self,
        token_ids_ST: Tensor,
        batch_size: int,
        see: See | None = None,
        *,
        watch_kv: bool = False,
        round_kv: Callable[[int, str, Tensor], Tensor] | None = None,
        desc: str = "layers",
    ) -> Tensor:
        """All layers and the final norm, [S, T, D].

        Args:
            see: as in `advance`, but with full names, `layers.3.down`. round_kv: with the layer's number before.
        """
        hidden = self.start(token_ids_ST, batch_size)
        for index in tqdm(range(self.num_layers), desc=desc, unit="layer", delay=3):
            layer_see = None if see is None else _prefixed(see, f"layers.{index}.")
            layer_round = None if round_kv is None else _of_layer(round_kv, index)
            self.advance(hidden, index, self.layer(index), layer_see, watch_kv=watch_kv, round_kv=layer_round)
        return self.outputs(hidden)

    # --- the model outside its layers ---------------------------------------------------------------------------

    def _read_outside(self) -> None:
        """Read the small tensors outside the layers, and make the buffers that are in no file."""
        model = self._model
        large = (self._embedding_name, self._head_name, "lm_head.weight")
        wanted = [name for name in model.state_dict() if name not in large]
        model.load_state_dict({name: self.tensor(name).float() for name in wanted}, strict=False, assign=True)
        # F.embedding wants its padding row among the rows; it only matters to gradients.
        self._embedding.padding_idx = None
        for module in model.modules():
            computed = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            for name in computed:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            if computed:
                model._init_weights(module)
        model.eval().requires_grad_(False)

    def _run_outside(self, embedded_BTD: Tensor) -> Tensor:
        return self._model.base_model(inputs_embeds=embedded_BTD, use_cache=False).last_hidden_state

    def _forget(self) -> None:
        for recorder in self._recorders:
            recorder.hidden_BTD = recorder.answer_BTD = None
            recorder.arguments = ((), {})


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """float32 tensors in nested tuples, lists and dictionaries in another dtype; one that is there twice stays one."""
    if dtype == torch.float32:
        return value
    cast: dict[int, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            return cast.setdefault(id(value), value.to(dtype))
        if isinstance(value, tuple | list):
            return type(value)(walk(item) for item in value)
        return {key: walk(item) for key, item in value.items()} if isinstance(value, dict) else value

    return walk(value)


def _on_meta(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    """The model without weights."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, attn_implementation=ATTENTION
            )
    except Exception as error:
        # transformers raises what it likes on a config that makes no sense.
        raise UserError(f"{folder / 'config.json'}: no model can be made of it: {first_line(error)}") from error


def _with_prefix(places: dict[str, Place], prefix: str) -> dict[str, Place]:
    """Names as the causal model has them: those of a backbone saved alone (GPT-2's) lack its prefix."""
    if any(name.startswith(f"{prefix}.") for name in places):
        return places
    return {name if name.startswith("lm_head.") else f"{prefix}.{name}": place for name, place in places.items()}


def _misfits(model: PreTrainedModel, family: Decoder, scheme: Scheme, places: Mapping[str, Place]) -> list[str]:
    """Which tensors are missing, unknown, or of another shape or kind than the model's."""
    tied = model.all_tied_weights_keys or {}
    prefix = f"{family.layers_path}."
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
                if not name.startswith(prefix) and name not in tied}  # fmt: skip
    high = set(expected)
    for index, layer in enumerate(model.get_submodule(family.layers_path).children()):
        shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        for name in family.linears(index):
            stored = family.stored_name(index, name)
            if _is_quantized(stored, scheme, places):
                parts = stored_shapes(scheme, *shapes.pop(f"{name}.weight"))
                expected |= {f"{stored}.{part}": shape for part, shape in parts.items()}
        if scheme.kv == "fp8":
            expected |= dict.fromkeys(kv_scale_names(family, index, layer).values(), (1,))
        for name, shape in shapes.items():
            stored = family.stored_name(index, name)
            expected[stored] = shape[::-1] if family.transposed(index, name) else shape
            high.add(stored)
    given = {name for name in places if name not in tied and not name.endswith(OFTEN_LEFT_OVER)}
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - given)]
    wrong += [f"{name} is unknown to this model" for name in sorted(given - expected.keys())]
    wrong += [other_shape(name, places[name].shape, expected[name])
              for name in sorted(expected.keys() & given) if places[name].shape != expected[name]]  # fmt: skip
    wrong += [f"{name} holds {places[name].dtype} and no scale" for name in sorted(high & given)
              if places[name].dtype not in HIGH]  # fmt: skip
    return wrong


def _is_quantized(stored: str, scheme: Scheme, places: Mapping[str, Place]) -> bool:
    """Whether a linear's weight is quantised, by its stored name: a scheme may leave some as they are."""
    return scheme.kind != "none" and (f"{stored}.weight" not in places or places[f"{stored}.weight"].dtype not in HIGH)


def kv_scale_names(family: Decoder, index: int, layer: nn.Module) -> dict[str, str]:
    """`k_scale` and `v_scale` -> their names in the checkpoint."""
    attention = next(name for name, module in layer.named_modules() if module is attention_of(layer))
    return {part: f"{family.stored_name(index, attention)}.{part}" for part in SCALES}


# --- seeing -----------------------------------------------------------------------------------------------------


@contextmanager
def watching(layer: nn.Module, sites: tuple[Site, ...], see: See | None, num_tokens: int) -> Iterator[None]:
    """Call `see(site name, x)` for every site's tensor while the layer runs on sequences of `num_tokens`."""
    handles = []
    try:
        for site in sites if see is not None else ():
            module = layer.get_submodule(site.tap)
            shape = (1, -1) if site.name.startswith("experts.") else (-1, num_tokens)

            def hook(
                _module: nn.Module, args: tuple[Any, ...], name: str = site.name, shape: tuple[int, int] = shape
            ) -> None:
                assert see is not None
                if args[0].numel():
                    see(name, args[0] if args[0].dim() == 3 else args[0].view(*shape, args[0].shape[-1]))

            handles.append(module.register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _with_kv(layer: nn.Module, functions: list[RoundKV]) -> Iterator[None]:
    """The layer's attention passes its keys and values through `functions`, before those that it has of its own."""
    if not functions:
        yield
        return
    attention = attention_of(layer)
    before = getattr(attention, "kv_functions", [])
    attention.kv_functions = [*functions, *before]  # type: ignore[assignment]
    try:
        yield
    finally:
        attention.kv_functions = before  # type: ignore[assignment]


def _seeing_kv(see: See) -> RoundKV:
    def function(name: str, x_BKTH: Tensor) -> Tensor:
        see(name, x_BKTH.transpose(1, 2).flatten(2))
        return x_BKTH

    return function


def _prefixed(see: See, prefix: str) -> See:
    return lambda name, x_BTC: see(prefix + name, x_BTC)


def _of_layer(round_kv: Callable[[int, str, Tensor], Tensor], index: int) -> RoundKV:
    return lambda name, x_BKTH: round_kv(index, name, x_BKTH)


def give_back() -> None:
    """Return freed memory to the system: C's allocator keeps what lies between pieces still in use."""
    gc.collect(0)
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)
