"""The commands of deploy/README.md, in the order in which it gives them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import yaml

from tests.deploy.cluster import DEPLOY

# Behind this the same steps are told once more in short, for the rarer case.
OTHERWISE = "**With a new version of Ray**"
STATE_MOUNT = "/var/lib/dataservice"


def commands_of(title: str) -> list[list[str]]:
    """Each command of a section's code blocks, as words."""
    text = (DEPLOY / "README.md").read_text()
    section = re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.M)[0]
    blocks = re.findall(r"^ *```\n(.*?)```", section.partition(OTHERWISE)[0], re.M | re.S)
    lines = "\n".join(map(dedent, blocks)).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def copy_state_out(words: list[str], state: Path) -> None:
    """What the command that copies the state out runs in the pod, over the state of this folder."""
    subprocess.run([sys.executable, "-c", words[-1].replace(STATE_MOUNT, str(state))], check=True)


def restore_state(state: Path) -> None:
    """What the job that puts the copy back runs, over the state of this folder."""
    job = yaml.safe_load((DEPLOY / "examples" / "restore-state" / "job.yaml").read_text())
    shell, flags, script = job["spec"]["template"]["spec"]["containers"][0]["command"]
    subprocess.run([shell, flags, script.replace(STATE_MOUNT, str(state))], check=True)
