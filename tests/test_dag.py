"""`dvc.yaml` declares exactly the parameters that a stage reads and the code that it imports."""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from oneaxis.config import STAGE_SECTIONS, compose
from oneaxis.config.schema import TABLES
from oneaxis.dag import import_closure, stage_code


@pytest.fixture(scope="module")
def stages(root: Path) -> dict[str, Any]:
    """The stages of the committed `dvc.yaml`."""
    loaded: dict[str, Any] = YAML(typ="safe").load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return loaded


def test_stages_are_those_of_the_schema_and_have_a_script_under_60_lines(stages: dict[str, Any], root: Path) -> None:
    assert list(stages) == list(STAGE_SECTIONS)
    for name, stage in stages.items():
        assert stage["cmd"] == f"python stages/{name}.py"
        assert len((root / "stages" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("name", STAGE_SECTIONS)
def test_declared_parameters_are_the_sections_that_the_stage_gets(stages: dict[str, Any], name: str) -> None:
    assert sorted(stages[name]["params"]) == sorted(STAGE_SECTIONS[name])


@pytest.mark.parametrize("name", STAGE_SECTIONS)
def test_declared_code_is_the_import_closure(stages: dict[str, Any], root: Path, name: str) -> None:
    declared = [entry for entry in stages[name]["deps"] if entry.endswith(".py")]
    assert declared == stage_code(root, name), "run `python -m oneaxis.dag`"


@pytest.mark.parametrize("name", STAGE_SECTIONS)
def test_every_parameter_of_a_declared_section_is_read_by_the_stages_code(root: Path, name: str) -> None:
    """A declared leaf that no code of the stage names would re-run the stage for nothing. (Of a mapping whose keys are
    names that the code computes, the mapping.)"""
    code = "\n".join(
        (root / path).read_text(encoding="utf-8") for path in stage_code(root, name) if "/config/" not in path
    )
    alternatives = [[], ["train=none", "quantize=none"], ["quantize=w8a8_int8_static"], ["pairs=on_policy"],
                    ["extract=records"]]  # fmt: skip
    for overrides in alternatives:
        values = compose(root / "conf", overrides).model_dump()
        for section in STAGE_SECTIONS[name]:
            for leaf in _leaves(values[section], section):
                word = leaf.rpartition(".")[2]
                assert re.search(rf"\.{word}\b", code), f"{name} declares {leaf} and never reads it"


def _leaves(value: Any, key: str) -> list[str]:
    if isinstance(value, dict) and value and not key.endswith((".premises", ".site_alpha", ".texts", "_args")):
        return [leaf for name, part in value.items() for leaf in _leaves(part, f"{key}.{name}")]
    return [key]


def test_every_stage_has_payload_provenance_and_metrics(stages: dict[str, Any]) -> None:
    for name, stage in stages.items():
        assert stage["outs"] == [f"artifacts/{name}", f"artifacts/{name}.provenance.json"]
        assert stage["metrics"] == [f"artifacts/{name}.metrics.json"]


def test_only_the_report_depends_on_provenance_and_on_everything(stages: dict[str, Any]) -> None:
    for name, stage in stages.items():
        provenance = [entry for entry in stage["deps"] if entry.endswith(".provenance.json")]
        others = [other for other in stages if other != "report"]
        assert provenance == ([f"artifacts/{other}.provenance.json" for other in others] if name == "report" else [])


def test_import_closure_follows_packages_functions_and_cycles(tmp_path: Path) -> None:
    package = tmp_path / "src" / "oneaxis"
    (package / "a").mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "a" / "__init__.py").write_text("", encoding="utf-8")
    (package / "a" / "b.py").write_text("import oneaxis.c\n", encoding="utf-8")
    (package / "c.py").write_text("from oneaxis.a import b\nimport os\n", encoding="utf-8")
    (package / "unused.py").write_text("", encoding="utf-8")
    script = tmp_path / "stages" / "s.py"
    script.parent.mkdir()
    script.write_text("def f():\n    from oneaxis.a.b import g\n", encoding="utf-8")
    assert import_closure(script, tmp_path / "src") == [
        "stages/s.py",
        "src/oneaxis/__init__.py",
        "src/oneaxis/a/__init__.py",
        "src/oneaxis/a/b.py",
        "src/oneaxis/c.py",
    ]


def test_dvc_depends_on_every_source_of_the_users(stages: dict[str, Any]) -> None:
    assert "${paths.model_source}" in stages["fetch_model"]["deps"]
    assert "${paths.sample_source}" in stages["sample_pairs"]["deps"]
    for table in TABLES:
        assert f"${{paths.{table}_source}}" in stages["prepare_data"]["deps"]
