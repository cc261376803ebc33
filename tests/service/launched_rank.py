"""One rank under a real torchrun: it opens once it is let, and writes down what it got.

    torchrun ... launched_rank.py ADDRESS FOLDER NAME [--group] [--break-at STEP]

FOLDER/NAME-RANK.open lets it open; FOLDER/NAME-RANK.jsonl tells what it did. It trains no step
while FOLDER/NAME.hold is there.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from torch import distributed

from trainer_client import ClientError, ShardDataset

RANK, RESTARTS = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main() -> None:
    """Train to the end; `--break-at` ends all ranks there, the first time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--break-at", type=int, default=-1)
    given = parser.parse_args()
    place = given.folder / f"{given.name}-{RANK}"
    if given.group:
        distributed.init_process_group("gloo")
    with place.with_suffix(".jsonl").open("a", buffering=1) as log:

        def tell(**what: object) -> None:
            log.write(json.dumps({**what, "restarts": RESTARTS}) + "\n")

        tell(ready=True, run_id=os.environ["TORCHELASTIC_RUN_ID"])
        while not place.with_suffix(".open").exists():
            time.sleep(0.02)
        try:
            train(given, place.with_suffix(".checkpoint"), tell)
        except ClientError as error:
            tell(error=type(error).__name__, said=str(error))
            os._exit(0)  # another rank's torchrun is not to restart this one


def train(given, checkpoint: Path, tell) -> None:
    """Every step, saving each."""
    with ShardDataset(given.address, job="job", timeout_s=60.0) as dataset:
        if checkpoint.exists():
            dataset.load_state_dict(json.loads(checkpoint.read_text()))
        for shard in dataset:
            ids = [i for m in shard.microbatches if m.cp_rank == 0 for i in m.sample_ids.tolist()]
            tell(step=shard.step, attempt=shard.attempt, samples=ids)
            if shard.step == given.break_at and not RESTARTS:
                wait_for_all(given, shard.step)
                os._exit(1)  # as when a collective fails, which every rank had come to
            while (given.folder / f"{given.name}.hold").exists():
                time.sleep(0.02)
            dataset.commit(shard.step)
            checkpoint.write_text(json.dumps(dataset.state_dict()))
    tell(ended=True)


def wait_for_all(given, step: int) -> None:
    """Until every rank wrote that it got `step`, and so has saved the ones before."""
    logs = [given.folder / f"{given.name}-{r}.jsonl" for r in range(int(os.environ["WORLD_SIZE"]))]
    while not all(f'"step": {step},' in log.read_text() for log in logs):
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
