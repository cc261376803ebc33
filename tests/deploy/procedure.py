"""The commands of deploy/README.md, in the order in which it gives them."""

import re
import shlex
from textwrap import dedent

from tests.deploy.cluster import DEPLOY

# Behind this the same steps are told once more in short, for the rarer case.
OTHERWISE = "**With a new version of Ray**"


def commands_of(title: str) -> list[list[str]]:
    """Each command of a section's code blocks, as words."""
    text = (DEPLOY / "README.md").read_text()
    section = re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.M)[0]
    blocks = re.findall(r"^ *```\n(.*?)```", section.partition(OTHERWISE)[0], re.M | re.S)
    lines = "\n".join(map(dedent, blocks)).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]
