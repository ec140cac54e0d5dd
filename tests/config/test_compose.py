"""Settings: what composes, what is refused and in which words, and that params.yaml follows from conf/."""

import shlex
import shutil
from pathlib import Path

import hydra
import pytest
from ruamel.yaml import YAML

from oneaxis.config import (
    STAGE_SECTIONS,
    compose,
    derived_paths,
    load_stage_config,
    read_params,
    render_params,
    write_params,
)
from oneaxis.config.compose import compose_raw
from oneaxis.errors import UserError
from oneaxis.pipeline import check_inputs


def test_committed_params_are_the_composed_defaults(root: Path) -> None:
    import subprocess

    committed = subprocess.run(
        ["git", "-C", str(root), "show", "HEAD:params.yaml"], capture_output=True, text=True, check=True
    ).stdout
    assert committed == render_params(compose(root / "conf"))


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (path.parent.name, path.stem)
        for path in sorted((Path(__file__).parents[2] / "conf").glob("*/*.yaml"))
        # conf/hardware/ is no group of settings: `oneaxis plan` reads devices from it.
        if path.stem not in ("path", "hub", "mine", "trace", "attach") and path.parent.name != "hardware"
    ],
)
def test_every_choice_composes(root: Path, group: str, choice: str) -> None:
    assert compose(root / "conf", [f"{group}={choice}"]).seed == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["quantize=w3"], ["quantize=w3", "none, w4a16, w8a8_fp8, w8a8_int8_dynamic, w8a8_int8_static"]),
        (["train.beta=much"], ["train.beta='much'", "a valid number"]),
        (["train.beta=-1"], ["train.beta=-1", "greater than 0"]),
        (["train.beta=inf"], ["train.beta=inf", "finite"]),
        (["train.beta=nan"], ["train.beta=nan", "finite"]),
        (["train.steps=true"], ["train.steps=True", "integer"]),
        (["train.processes=3"], ["train", "processes is 3; allowed: a divisor of batch_size (4)"]),
        (["pairs=on_policy", "sample=none"], ["pairs=on_policy, sample=none", "sample=on_policy"]),
        (["train.steps=4.0"], ["train.steps=4.0", "integer"]),
        (["train.bet=1"], ["train.bet=1", "no such key"]),
        (["+train.bet=1"], ["train.bet=1", "no such key"]),
        (["train.probes.watched=17"], ["train.probes", "watched is 17", "at most prompts (16)"]),
        (["+train.probes.texts.'a b'=x"], ["+train.probes.texts.'a b'=x", "not an override"]),
        (["train=none", "train.beta=1"], ["train.beta=1", "no such key", "train=dpo", "would have it"]),
        (["load.search.probes=3"], ["load.search.probes=3: no such key", "; load=capacity would have it"]),
        (["load.shapes.prefill_heavy.shared_prefix=5"], ["prefill_heavy", "is no place of a list; allowed: 0, 1"]),
        (["load.shapes.0.service_class=fast"], ["no such key yet; allowed: +load.shapes.0.service_class=fast"]),
        (["+load.shapes.0.service_class=fast"], ["service_class", "fast", "allowed"]),
        (["train.warmup_steps=1000"], ["train: warmup_steps is 1000", "allowed: at most steps"]),
        (["quantize.smooth.alpha=2"], ["quantize.smooth.alpha=2", "less than or equal to 1"]),
        (["quantize.smooth.sites=[qkv,qkv]"], ["quantize.smooth", "at most once"]),
        (["quantize.ignore=[]"], ["quantize", "lm_head"]),
        (["load.shapes=[]"], ["load: shapes has 0; allowed: two at least"]),
        (["pairs.rule=count"], ["pairs", "0.75", "whole numbers"]),
        (["model=path"], ["model.path", "needs a value"]),
        (["model=hub", "model.id=x"], ["model.revision", "needs a value"]),
        (["data=mine"], ["data.pairs.source", "path"]),
        (["data.pairs.source.path=a.jsonl"], ["data.pairs.source", "path is 'a.jsonl'", "only null"]),
        (["measure.session='a b'"], ["measure.session='a b': allowed: at most 60 of letters"]),
        (["serve.port=70000"], ["serve.port=70000", "65535"]),
        (["serve=attach"], ["serve.base_url", "needs a value"]),
        (["serve=attach", "serve.base_url=http://me:key@host"], ["serve.base_url: http://***@host holds a user"]),
        (
            ["serve=attach", "serve.base_url=http://host", "serve.api_key_env='a b'"],
            ["serve.api_key_env='a b': allowed: the name of an environment variable"],
        ),
        (
            ["load.shapes=[{name: 'a b', prompt_tokens: 8, output_tokens: 4}]"],
            ["load.shapes.0.name='a b': allowed: at most 60 of letters, digits"],
        ),
        (["serve.port=${oc.env:HOME}"], ["serve.port", "frozen"]),
        (["nonsense"], ["nonsense", "key=value"]),
        (["a b=c"], ["a b=c", "key=value"]),
        (["quantum=1"], ["quantum=1", "no such key"]),
        (["~train"], ["train", "missing"]),
        (["seed=-1"], ["seed=-1", "greater than or equal to 0"]),
        # What is named is the key of the choice, not the group with all that it holds.
        (["extract=records", "extract.kind=foo"], ["settings: extract.kind=foo; allowed: none, documents"]),
        (["diverge.kind=x"], ["settings: diverge.kind=x; allowed: none, greedy"]),
        (["train.kind=1"], ["settings: train.kind=1; allowed: ", "dpo"]),
        (["serve.kind=x"], ["settings: serve.kind=x; allowed: vllm, attach"]),
        (["~extract.kind"], ["settings: extract.kind: missing; allowed: "]),
        # No document fits beside such an answer.
        (
            ["extract=records", "extract.max_tokens=100000"],
            ["settings: extract.max_tokens=100000: ", "allowed: fewer than serve.max_model_len="],
        ),
        (
            ["extract=records", "extract.reasoning_tokens=1000000", "extract.first=reasoning"],
            ["extract.reasoning_tokens=1000000: ", "serve.max_model_len="],
        ),
        (["extract=lists", "extract.row_tokens=1000000"], ["extract.row_tokens=1000000, 2 rows: 2000016 tokens"]),
        (["extract=records", "serve=attach", "serve.base_url=http://host"], ["settings: extract.kind is documents"]),
        (["extract=records", "extract.records=99999999999"], ["extract.records=99999999999", "100000"]),
        (["extract=lists", "extract.lists=99999999999"], ["extract.lists=99999999999", "100000"]),
        # The key as it is written, without pydantic's names for the branches of a union.
        (["draft=ngram", "draft.num_tokens=0"], ["settings: draft.num_tokens=0: allowed: greater"]),
        (["split=push", "+split.foo=1"], ["settings: split.foo=1: no such key"]),
        (["data.pairs.source.path=3"], ["settings: data.pairs.source.path=3: allowed: "]),
        (["sample=on_policy", "sample.path=3"], ["settings: sample.path=3: allowed: "]),
        (["score.premises={a: 3}"], ["settings: score.premises.a=3: allowed: a valid string"]),
        # Mappings and lists.
        (
            ["serve.engine_args=[1,2]"],
            ["serve.engine_args=[1,2]: ", "allowed: a mapping, serve.engine_args={name: value}"],
        ),
        (["load.shapes={a: 1}"], ["load.shapes={a: 1}: ", "allowed: a list, load.shapes=[value, ...]"]),
        (["load.clases={a: 1}"], ["settings: load.clases={'a': 1}: no such key here"]),
        (["serve.engine_args.foo=3"], ["serve.engine_args.foo=3: ", "allowed: +serve.engine_args.foo=3"]),
        (["serve=5"], ["serve=5: serve is a group; allowed: attach, reproducible, vllm"]),
        # Limits.
        (["load.rates_rps=[4.0,4.0000001]"], ["load: rates_rps has 4.0 and 4.0000001, which are both 4 "]),
        (
            ["load=trace", "load.trace=a.csv", "load.trace_speed=[1.0,1.00000001]"],
            ["load: trace_speed has 1.0 and 1.00000001"],
        ),
        (["load.warmup_requests=1000000"], ["load.warmup_requests=1000000", "10000"]),
        (["load.request_timeout_s=1e-9"], ["load.request_timeout_s=1e-09", "0.1"]),
        (["draft=layers", "draft.warmup_steps=500"], ["draft: warmup_steps is 500; allowed: at most steps (120)"]),
        (["extract=records", "extract.repetition_penalty=1e-300"], ["extract.repetition_penalty=1e-300", "0.1"]),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(
    root: Path, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        compose(root / "conf", overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert ": :" not in message
    for word in words:
        assert word in message


def test_broken_yaml_under_conf_is_one_line(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "seed.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "conf" / "guards" / "default.yaml").write_text("max: [1,", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        compose(tmp_path / "conf")
    assert "\n" not in str(caught.value)
    assert "default.yaml" in str(caught.value)


@pytest.mark.parametrize(("content", "words"), [(b"5", "holds int"), (b"- a", "holds list"), (b"a: \xff", "not text")])
def test_a_file_that_is_no_mapping_is_named(root: Path, tmp_path: Path, content: bytes, words: str) -> None:
    shutil.copytree(root / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "zz.yaml").write_bytes(content)
    with pytest.raises(UserError, match=rf"^conf/experiment/zz\.yaml: {words}.*; allowed: a mapping"):
        compose(tmp_path / "conf", ["experiment=zz"])


def test_a_mapping_may_bring_keys_and_the_examples_of_the_docs_compose(root: Path, tmp_path: Path) -> None:
    told = compose(root / "conf", ["serve.engine_args={speculative_config: {method: ngram}}"]).serve
    assert told.kind == "vllm"
    assert told.engine_args == {"speculative_config": {"method": "ngram"}}
    page = (root / "docs" / "load.md").read_text(encoding="utf-8").partition("## Shapes")[2]
    written, command = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("yaml", "sh"))
    shutil.copytree(root / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "profile" / "mine.yaml").write_text(f"# @package _global_\n{written}", encoding="utf-8")
    for overrides in (["profile=mine"], shlex.split(command.replace("\\\n", " "))[2:]):
        load = compose(tmp_path / "conf", overrides).load
        assert load.classes["batch"].ttft_ms == 5000
        assert [(shape.name, shape.service_class) for shape in load.shapes] == [("chat", None), ("rag", "batch")]


def test_overrides_on_the_command_line_win_over_the_profile(root: Path) -> None:
    config = compose(root / "conf", ["profile=tiny", "train.steps=7"])
    assert config.model.kind == "random"
    assert config.train.kind == "dpo"
    assert config.train.steps == 7


def test_params_survive_a_round_trip_and_an_equal_write_keeps_the_file(root: Path, tmp_path: Path) -> None:
    config = compose(root / "conf", ["serve.kv_cache_gib=2", "report.title='1:30'", "+serve.engine_args.swap_space=4"])
    assert write_params(config, tmp_path)
    values = read_params(tmp_path)
    assert values["serve"]["kv_cache_gib"] == 2.0
    # Whole numbers stay floats where the schema says float: DVC must not see 1 and 1.0 as two spellings of one value.
    assert isinstance(values["serve"]["kv_cache_gib"], float)
    assert values["report"]["title"] == "1:30"
    before = (tmp_path / "params.yaml").stat().st_mtime_ns
    assert not write_params(config, tmp_path)
    assert (tmp_path / "params.yaml").stat().st_mtime_ns == before


@pytest.mark.parametrize("stage", sorted(STAGE_SECTIONS))
def test_a_stage_sees_its_sections_and_no_others(root: Path, tmp_path: Path, stage: str) -> None:
    write_params(compose(root / "conf"), tmp_path)
    config, paths, plain = load_stage_config(tmp_path, stage)
    assert set(plain) == set(STAGE_SECTIONS[stage])
    assert {"policy", "served", "model_source", "pairs_source"} < set(paths)
    for section in type(config).model_fields:
        assert hasattr(config, section) == (section in STAGE_SECTIONS[stage])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("beta: 0.1", "beta: lots", ["params.yaml", "train.beta='lots'"]),
        ("beta: 0.1", "betta: 0.1", ["params.yaml", "train.betta"]),
        ("kind: dpo", "kind: none", ["params.yaml", "train"]),
        ("train:", "train: [", ["params.yaml", "not YAML"]),
    ],
)
def test_a_hand_edited_params_file_is_checked_by_the_stage(
    root: Path, tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    write_params(compose(root / "conf"), tmp_path)
    path = tmp_path / "params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_stage_config(tmp_path, "train_dpo")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_paths_that_do_not_follow_from_the_kinds_are_refused(root: Path, tmp_path: Path) -> None:
    write_params(compose(root / "conf"), tmp_path)
    path = tmp_path / "params.yaml"
    text = path.read_text(encoding="utf-8")
    assert "policy: artifacts/train_dpo/checkpoint" in text
    path.write_text(text.replace("policy: artifacts/train_dpo", "policy: artifacts/fetch_model"), encoding="utf-8")
    with pytest.raises(UserError, match=r"paths\.policy"):
        load_stage_config(tmp_path, "calibrate")


@pytest.mark.parametrize(
    ("overrides", "policy", "served"),
    [
        ([], "train_dpo", "quantize"),
        (["train=none"], "fetch_model", "quantize"),
        (["quantize=none"], "train_dpo", "train_dpo"),
        (["train=none", "quantize=none"], "fetch_model", "fetch_model"),
    ],
)
def test_paths_follow_the_choices(root: Path, tmp_path: Path, overrides: list[str], policy: str, served: str) -> None:
    write_params(compose(root / "conf", overrides), tmp_path)
    _, paths, _ = load_stage_config(tmp_path, "serve")
    assert paths["policy"] == f"artifacts/{policy}/checkpoint"
    assert paths["served"] == f"artifacts/{served}/checkpoint"


def test_dvc_depends_on_the_users_own_files_by_name(root: Path, tmp_path: Path) -> None:
    write_params(compose(root / "conf", ["data=mine", "data.pairs.source.path=my/pairs.jsonl"]), tmp_path)
    _, paths, _ = load_stage_config(tmp_path, "prepare_data")
    assert paths["pairs_source"] == "my/pairs.jsonl"
    assert paths["items_source"] == paths["model_source"] == "data/SOURCES.md"


def test_a_trace_is_a_file_that_the_sweep_depends_on(root: Path) -> None:
    paths = derived_paths(compose(root / "conf", ["load=trace", "load.trace=/data/azure.csv"]).model_dump())
    assert paths["load_source"] == "/data/azure.csv"
    assert derived_paths(compose(root / "conf").model_dump())["load_source"] == "data/SOURCES.md"
    stages = YAML(typ="safe").load((root / "dvc.yaml").read_text())["stages"]
    assert "${paths.load_source}" in stages["sweep"]["deps"]


def test_a_trace_is_read_before_anything_runs(root: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 20, "output_length": 4}\n', encoding="utf-8")
    # A profile's own shapes give way to the trace's lengths.
    config = compose(root / "conf", ["profile=tiny", "load=trace", f"load.trace={trace}"])
    assert config.load.shapes == []
    check_inputs(root, config)
    with trace.open("a", encoding="utf-8") as file:
        file.write('{"timestamp": 1, "input_length": -20, "output_length": 4}\n')
    with pytest.raises(UserError, match=r"trace\.jsonl: line 2: input_length is -20; allowed: a whole number from 4"):
        check_inputs(root, config)
    folder = compose(root / "conf", ["profile=tiny", "load=trace", f"load.trace={tmp_path}"])
    with pytest.raises(UserError, match="is a folder; allowed: a JSONL or CSV file"):
        check_inputs(root, folder)
    with pytest.raises(UserError, match=r"load: together is True and does nothing with arrival=trace.*allowed: false"):
        compose(root / "conf", ["load=trace", f"load.trace={trace}", "load.together=true"])


def test_a_profile_sets_rates_only_where_requests_come_at_rates(root: Path) -> None:
    rates = {
        load: compose(root / "conf", [f"load={load}", "profile=tiny"]).load.rates_rps
        for load in ("default", "ramp", "closed")
    }
    assert rates == {"default": [4.0, 8.0], "ramp": [4.0, 8.0], "closed": []}


def test_equal_compositions_are_made_once_until_a_file_changes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "conf"
    shutil.copytree(root / "conf", conf)
    calls = []
    real = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *given, **named: calls.append(given) or real(*given, **named))
    first = compose_raw(conf, ["load=paired"])
    first["load"]["duration_s"] = -1
    assert compose_raw(conf, ["load=paired"])["load"]["duration_s"] == 24
    assert len(calls) == 1
    compose_raw(conf, ["load=closed"])
    assert len(calls) == 2
    paired = conf / "load" / "paired.yaml"
    paired.write_text(paired.read_text().replace("duration_s: 24", "duration_s: 21"))
    assert compose_raw(conf, ["load=paired"])["load"]["duration_s"] == 21
    paired.unlink()
    for _ in range(2):
        with pytest.raises(UserError, match="load=paired: no such choice"):
            compose_raw(conf, ["load=paired"])


def test_a_password_in_an_override_is_not_repeated(root: Path) -> None:
    for override in ("serve.base_url=http://me:s3cret@host", "+serve.base_url=http://me:s3=cret@host"):
        with pytest.raises(UserError) as refused:
            compose(root / "conf", [override])
        assert "cret" not in str(refused.value)
