"""The `oneaxis` command: compose settings and run the pipeline, restore them, look at the machine and the results.

    oneaxis run [OVERRIDE ...]   compose conf/ with Hydra overrides, write params.yaml, run DVC, track, report
    oneaxis run -m KEY=A,B,...   a multirun: each value in a work tree of its own, the first is the baseline; verdicts
    oneaxis run -m --resume ID   go on with a multirun that was interrupted; finished jobs are kept
    oneaxis promote ID POINT     bring a point of a multirun into the workspace
    oneaxis clean [ID ...]       remove idle slots and stale locks, or these multiruns; --cache: what nothing uses
    oneaxis reset                put the default settings back into params.yaml
    oneaxis track                complete the MLflow runs: of the present state (after a bare `dvc repro`), of multiruns
    oneaxis experiments          list the questions of conf/experiment/: axis, values, targets, cost
    oneaxis doctor               say what this machine can run, and what is missing
    oneaxis verify               compare the artifacts with their manifests, params.yaml and dvc.lock
    oneaxis judge BASE CAND      compare two runs, or results of other tools: accept, reject, tie, unresolved or
                                 INVALID, and why
    oneaxis plan WHAT            the arithmetic before a run: ceilings, memory, speculation, cost; beside a finished run
    oneaxis lint PATH...         what is wrong with JSON Schemas, Pydantic models, and the sampling of requests
    oneaxis ui [ID]              MLflow's pages: this multirun along its axis (default: the newest), and all runs

Exit codes: 0 done; 1 failed, or the run is INVALID; 2 refused before running; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from oneaxis import __version__
from oneaxis.errors import RunError, UserError
from oneaxis.lint.command import add_lint_parser
from oneaxis.plan.command import add_plan_parser
from oneaxis.stage import QUIET

CONF = "conf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes positionals in one piece only: `run -m a=1,2 --combine b=3` has them in two.
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    try:
        return int(options.action(options))
    except (UserError, RunError) as error:
        print(f"oneaxis: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("oneaxis: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"oneaxis: {error.strerror or error}: {error.filename or Path.cwd()}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; its subcommands' parsers are of the same class."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="oneaxis", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"oneaxis {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="compose the settings and run the pipeline")
    run.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="Hydra override: group=choice or key=value")
    run.add_argument("--cfg", choices=["job"], help="print the composed settings and stop")
    run.add_argument("-m", "--multirun", action="store_true", help="one run for each value of the axis, compared")
    run.add_argument("--combine", action="store_true", help="with -m: change several axes at once, and each alone")
    run.add_argument("--resume", metavar="ID", help="with -m: go on with this multirun")
    run.add_argument("--dry-run", action="store_true", help="with -m: print the plan and stop")
    run.set_defaults(action=_run)

    promote = commands.add_parser("promote", help="bring a point of a multirun into the workspace")
    promote.add_argument("point", nargs="+", metavar="ID POINT", help="as two words, or as ID/POINT")
    promote.set_defaults(action=_promote)

    clean = commands.add_parser("clean", help="remove idle slots and stale locks, or whole multiruns")
    clean.add_argument("multiruns", nargs="*", metavar="ID", help="remove these multiruns' records and commits")
    clean.add_argument("--cache", action="store_true", help="remove from the DVC cache what nothing here uses")
    clean.set_defaults(action=_clean)

    for name, action, text in (
        ("reset", _reset, "put the default settings back into params.yaml"),
        ("track", _track, "complete the MLflow runs of the present state and of all multiruns"),
        ("doctor", _doctor, "say what this machine can run"),
        ("verify", _verify, "compare the artifacts with their records"),
    ):
        commands.add_parser(name, help=text).set_defaults(action=action)
    judge = commands.add_parser(
        "judge",
        help="compare two runs and say whether the candidate is accepted",
        description="Two runs of ours, two outputs of lm-eval, or results of vllm bench serve (--save-detailed), "
        "guidellm or AIPerf: one file a side, or several repetitions, joined by commas or in a folder "
        "(docs/judge-others.md).",
    )
    judge.add_argument(
        "baseline", type=Path, metavar="BASELINE", help="artifacts/, a project, a multirun's point, or files"
    )
    judge.add_argument("candidate", type=Path, metavar="CANDIDATE", help="the same of the other run")
    judge.add_argument("--metric", help="gate on this metric; without it the headline metrics are described")
    judge.add_argument("--better", choices=["lower", "higher"], help="where the metric's name does not say it")
    judge.add_argument("--bar", type=float, default=0.0, help="smallest effect that counts, in the metric's unit")
    judge.add_argument(
        "--margin", type=float, help="claim instead that no more than this is lost, in the metric's unit"
    )
    judge.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", default=[],
        help="for results of other tools: what a good request keeps, as in ttft:500 tpot:50 e2el:3000; gives the "
        "metrics attainment and goodput_tok_s",
    )  # fmt: skip
    judge.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    judge.set_defaults(action=_judge)
    asked = commands.add_parser("experiments", help="list the questions of conf/experiment/")
    asked.add_argument("--json", action="store_true", help="for programs")
    asked.set_defaults(action=_experiments)
    add_plan_parser(commands)
    add_lint_parser(commands)
    pages = commands.add_parser("ui", help="MLflow's pages on 127.0.0.1")
    pages.add_argument("multirun", nargs="?", metavar="ID", help="a multirun (default: the newest)")
    pages.add_argument("--port", type=int, default=5000)
    pages.set_defaults(action=_ui)
    return parser


def _project() -> Path:
    root = Path.cwd()
    for name in ("dvc.yaml", CONF):
        if not (root / name).exists():
            raise UserError(f"{root}: holds no {name}; run oneaxis from the root of an oneaxis project")
    return root


def _run(options: argparse.Namespace) -> int:
    from oneaxis.config import render_params
    from oneaxis.config.compose import compose_all
    from oneaxis.multirun.experiments import one_point
    from oneaxis.pipeline import run_pipeline
    from oneaxis.serve.forked import preloaded_engines

    root = _project()
    if options.multirun or options.resume:
        from oneaxis.multirun.run import run_multirun

        combine = ["experiment.combine=true"] if options.combine else []
        with preloaded_engines():
            return run_multirun(root, [*options.overrides, *combine], options.resume, options.dry_run)
    if options.combine or options.dry_run:
        raise UserError(f"{'--combine' if options.combine else '--dry-run'}: belongs to a multirun; allowed: with -m")
    composed = compose_all(root / CONF, options.overrides)
    config = composed.config
    if options.cfg:
        print(render_params(config), end="")
        return 0
    if said := one_point(composed):
        print(said, flush=True)
    with preloaded_engines():
        return run_pipeline(root, config, options.overrides)


def _promote(options: argparse.Namespace) -> int:
    from oneaxis.multirun.promote import promote

    words = [part for word in options.point for part in word.split("/", 1)]
    if len(words) != 2:
        raise UserError(f"promote {' '.join(options.point)}: allowed: ID POINT, or ID/POINT")
    print(promote(_project(), *words))
    return 0


def _clean(options: argparse.Namespace) -> int:
    from oneaxis.multirun.clean import clean

    print(clean(_project(), options.multiruns, cache=options.cache))
    return 0


def _reset(_options: argparse.Namespace) -> int:
    from oneaxis.config import compose, write_params
    from oneaxis.pipeline import work_tree

    root = _project()
    with work_tree(root):
        changed = write_params(compose(root / CONF), root)
    print("params.yaml: " + ("default settings restored" if changed else "holds the default settings already"))
    return 0


def _track(_options: argparse.Namespace) -> int:
    from oneaxis.track.command import track_all

    return track_all(_project())


def _doctor(_options: argparse.Namespace) -> int:
    from oneaxis.doctor import diagnose

    return diagnose(Path.cwd())


def _verify(_options: argparse.Namespace) -> int:
    from oneaxis.verify import verify

    problems = verify(_project())
    for problem in problems:
        print(f"oneaxis: {problem}", file=sys.stderr)
    if not problems:
        print("every artifact matches its manifest, params.yaml and dvc.lock")
    return 1 if problems else 0


def _judge(options: argparse.Namespace) -> int:
    from oneaxis.judge.command import judge_folders

    return judge_folders(
        options.baseline,
        options.candidate,
        metric=options.metric,
        better=options.better,
        bar=options.bar,
        margin=options.margin,
        as_json=options.json,
        conf_dir=Path.cwd() / CONF,
        goodput=options.goodput,
    )


def _experiments(options: argparse.Namespace) -> int:
    from oneaxis.multirun.experiments import list_experiments

    return list_experiments(_project(), as_json=options.json)


def _ui(options: argparse.Namespace) -> int:
    from oneaxis.track.command import show_pages

    return show_pages(_project(), options.multirun, options.port)


if __name__ == "__main__":
    sys.exit(main())
