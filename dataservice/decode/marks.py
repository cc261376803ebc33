"""Marks inside text on its way to tokens.

A chat template sees one string a message; what has to survive it is carried by code points
that Unicode sets aside as noncharacters, which no text contains. A record that contains one
all the same is refused.
"""

import re

from dataservice.core.sample import MediaKind

BREAK = "\ufdd0"
"""Stands inside text that looks like a control token: both sides are tokenised alone."""
LOSS_OPEN = "\ufdd1"
LOSS_CLOSE = "\ufdd2"
"""Around what the model learns to say."""
SLOTS: dict[MediaKind, str] = {"image": "\ufdd3", "video": "\ufdd4", "audio": "\ufdd5"}
"""Where a medium goes."""

RESERVED = re.compile("[\ufdd0-\ufdd5\ud800-\udfff]")
"""What no text may hold: the marks, and halves of surrogate pairs, which JSON can write and
UTF-8 cannot."""
