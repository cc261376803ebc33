from tests.service.conftest import corpus

__all__ = ["corpus"]
