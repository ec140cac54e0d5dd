"""A clone of what is on disk, for tests that run the project as a user does."""

import shutil
import subprocess
from pathlib import Path


def clone(root: Path, here: Path) -> Path:
    """Copy the tracked and the new files of `root` to `here`, a git repository of one commit."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, here / name)
    git = ["git", "-C", str(here), "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "clone"]):
        subprocess.run([*git, *words], check=True)
    return here
