"""The soak's data: a small version of the demo's corpus, and job files over it.

Five sources of real media are mixed, packed, balanced and grouped: the longest samples need
context-parallel groups. The vision processor can be held (see vision.py).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from demo.corpus import make_corpus
from demo.tokenizer import train_tokenizer
from soak.vision import IMPORT_PATH, NAME

ROOT = Path(__file__).resolve().parent.parent
DEMO_JOB = ROOT / "demo" / "job.yaml"
SCALE = 0.12


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """The options in which a soak's jobs differ. `weights` are by source; a source without one has
    1."""

    batch_samples: int = 8
    memory_tokens: int = 2304  # three ranks hold the longest sample
    epochs: int = 1
    seed: int = 0
    ready_steps: int = 3
    window_steps: int = 1
    weights: tuple[tuple[str, float], ...] = ()


def make_data(home: Path, *, scale: float = SCALE, seed: int = 1) -> None:
    """Make corpus, tokenizer and index in `home`."""
    make_corpus(home / "corpus", seed=seed, scale=scale)
    train_tokenizer(home / "corpus", home / "tokenizer")
    spec = read_job(write_job(home, "any", JobShape()).read_text(), home)
    index_job(spec, custom_processors={NAME: IMPORT_PATH})


def write_job(home: Path, job: str, shape: JobShape) -> Path:
    """Write `home`/JOB.yaml; jobs of every shape share the index."""
    plain: dict[str, Any] = yaml.safe_load(DEMO_JOB.read_text())
    weights = dict(shape.weights)
    sources = [
        {**source, "weight": weights.get(source["name"], 1.0)} for source in plain["sources"]
    ]
    vision = dict(plain["pipeline"]["vision"])
    del vision["kind"]
    pipeline = {**plain["pipeline"], "vision": {"kind": "custom", "name": NAME, "options": vision}}
    kept = {k: v for k, v in asdict(shape).items() if k in ("epochs", "seed", "ready_steps")}
    plan = {**plain["plan"], "memory_tokens": shape.memory_tokens}
    plan["window_steps"] = shape.window_steps
    changes = {"job": job, "sources": sources, "pipeline": pipeline, "plan": plan, **kept}
    path = home / f"{job}.yaml"
    batch = {"samples": shape.batch_samples}
    path.write_text(yaml.safe_dump({**plain, **changes, "batch": batch}))
    return path
