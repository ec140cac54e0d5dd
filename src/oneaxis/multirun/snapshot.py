"""From what is on disk to a git commit that every job of a multirun runs from, and from a job to a commit of its own.

The snapshot holds all that git tracks or would track, as it is on disk: uncommitted and new files too. It is built
through an index of its own, so the user's index, stash and work tree stay as they are, and pinned by a ref
(`refs/oneaxis/<multirun>/...`), since git's garbage collection drops what no ref reaches. `params.yaml` and `dvc.lock`
are no part of it: every job writes its own.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from oneaxis.errors import RunError, UserError
from oneaxis.multirun.record import MULTIRUN
from oneaxis.stage import STATE

REFS = "refs/oneaxis"
LARGEST_BYTES = 100 * 2**20
"""A new or changed file beyond this is refused: git keeps whatever a snapshot holds."""
WRITTEN = ("params.yaml", "dvc.lock")
"""What every run writes."""
IDENTITY = {
    "GIT_AUTHOR_NAME": "oneaxis",
    "GIT_COMMITTER_NAME": "oneaxis",
    "GIT_AUTHOR_EMAIL": "oneaxis@localhost",
    "GIT_COMMITTER_EMAIL": "oneaxis@localhost",
}
"""Of the commits made here: a machine may have no identity configured, and these are not the user's."""


def git(root: Path, *arguments: str, index: Path | None = None) -> str:
    """Run git in `root` and return what it prints, without the last line's end.

    Raises:
        RunError: with git's own words.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | IDENTITY
    if index:
        environment["GIT_INDEX_FILE"] = str(index)
    # Hooks of the user's are for the user's own commits and checkouts.
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.addEmbeddedRepo=false", "-C", str(root)]
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError as error:
        raise RunError("git: not installed; a multirun needs it") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}"
        raise RunError(f"git {arguments[0]}: {said}")
    return done.stdout.rstrip("\n")


def repository(root: Path) -> tuple[Path, str]:
    """The top folder of the git work tree that holds `root`, and `root` relative to it ("" or ending in "/").

    Raises:
        UserError: when `root` is in no git work tree.
    """
    try:
        return Path(git(root, "rev-parse", "--show-toplevel")), git(root, "rev-parse", "--show-prefix")
    except RunError as error:
        if "not a git repository" in str(error) or "work tree" in str(error):
            raise UserError(f"{root}: in no git repository; a multirun runs from a commit of what is on disk; "
                            "allowed: a clone, or `git init`") from error  # fmt: skip
        raise


def make_snapshot(root: Path) -> str:
    """The commit that holds what is on disk: HEAD itself when nothing differs from it.

    Raises:
        UserError: outside git, or for a file too large to keep in git. RunError: when git fails.
    """
    top, prefix = repository(root)
    head = head_commit(root)
    _refuse_large(top, prefix)
    with _temporary_index(root, copy=True) as index:
        git(top, "add", "-A", index=index)
        written = [prefix + name for name in WRITTEN]
        ours = [prefix + name for name in (STATE, MULTIRUN)]
        git(top, "rm", "-rqf", "--cached", "--ignore-unmatch", "--", *written, *ours, index=index)
        for entry in git(top, "ls-tree", head, "--", *written).splitlines() if head else []:
            facts, name = entry.split("\t")
            mode, _, blob = facts.split()
            git(top, "update-index", "--add", "--cacheinfo", f"{mode},{blob},{name}", index=index)
        tree = git(top, "write-tree", index=index)
    if head and tree == git(top, "rev-parse", f"{head}^{{tree}}"):
        return head
    parent = ["-p", head] if head else []
    return git(top, "commit-tree", tree, *parent, "-m", "oneaxis: what was on disk when a multirun began")


def head_commit(root: Path) -> str:
    """The commit of HEAD; empty in a repository without one."""
    try:
        return git(root, "rev-parse", "--verify", "-q", "HEAD^{commit}")
    except RunError:
        return ""


def point_commit(root: Path, snapshot: str, files: Mapping[str, Path], message: str) -> str:
    """A commit on the snapshot that also holds `files`: path in the project -> file with its content.

    `dvc metrics diff`, `dvc params diff` and `git checkout` then work on it.
    """
    _, prefix = repository(root)
    with _temporary_index(root, copy=False) as index:
        git(root, "read-tree", snapshot, index=index)
        for name, path in sorted(files.items()):
            blob = git(root, "hash-object", "-w", "--no-filters", "--", str(path.resolve()))
            git(root, "update-index", "--add", "--cacheinfo", f"100644,{blob},{prefix}{name}", index=index)
        tree = git(root, "write-tree", index=index)
    return git(root, "commit-tree", tree, "-p", snapshot, "-m", message)


def pin(root: Path, multirun: str, name: str, commit: str) -> str:
    """Keep `commit` under `refs/oneaxis/<multirun>/<name>`; returns the ref."""
    ref = f"{REFS}/{multirun}/{name}"
    git(root, "update-ref", ref, commit)
    return ref


def refs(root: Path, multirun: str = "") -> Sequence[str]:
    """Our refs: of one multirun, or all."""
    return git(root, "for-each-ref", "--format=%(refname)", f"{REFS}/{multirun}".rstrip("/") + "/").splitlines()


def has_commit(root: Path, commit: str) -> bool:
    """Whether the repository holds that commit."""
    try:
        git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except RunError:
        return False
    return True


@contextmanager
def _temporary_index(root: Path, *, copy: bool) -> Iterator[Path]:
    """An index beside the user's; with `copy` it begins as the user's, which saves hashing every file again."""
    own = Path(root, git(root, "rev-parse", "--git-path", "index"))
    with tempfile.TemporaryDirectory(prefix="oneaxis-index-") as folder:
        index = Path(folder) / "index"
        if copy and own.is_file():
            shutil.copy2(own, index)
        yield index


def _refuse_large(top: Path, prefix: str) -> None:
    for name in git(top, "ls-files", "-z", "--others", "--modified", "--exclude-standard").split("\0"):
        path = top / name
        if name and not name.startswith(f"{prefix}{STATE}/") and path.is_file() and not path.is_symlink():
            size = path.stat().st_size
            if size > LARGEST_BYTES:
                raise UserError(f"{path}: {size / 2**20:.0f} MiB and not ignored by git; allowed in what a multirun "
                                f"snapshots: {LARGEST_BYTES // 2**20} MiB a file; name it in .gitignore")  # fmt: skip
