from tests.trainer_client.runtime.conftest import world

__all__ = ["world"]
