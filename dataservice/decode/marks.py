"""Marks inside text on its way to tokens.

A chat template sees each message as one string. The marks that must survive it are code points that
Unicode reserves as noncharacters, which ordinary text does not contain. A record that contains one
is refused.
"""

import re

from dataservice.core.sample import MediaKind

BREAK = "\ufdd0"
"""Stands inside text that looks like a control token: the text on either side is tokenised
separately."""
LOSS_OPEN = "\ufdd1"
LOSS_CLOSE = "\ufdd2"
"""Stand around text that the model learns to generate."""
SLOTS: dict[MediaKind, str] = {"image": "\ufdd3", "video": "\ufdd4", "audio": "\ufdd5"}
"""Stand for a medium, by kind."""

RESERVED = re.compile("[\ufdd0-\ufdd5\ud800-\udfff]")
"""Characters that no text may contain: the marks, and halves of surrogate pairs, which JSON can
write and UTF-8 cannot."""
