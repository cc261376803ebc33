"""What the server of `forking` loads before it forks."""

import gc

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import tests.fuzz.tasks
import tests.trainer_client.adapters.foreign_models  # noqa: F401
import trainer_client.runtime  # noqa: F401

gc.collect()
gc.freeze()  # what is here already is no garbage of theirs
