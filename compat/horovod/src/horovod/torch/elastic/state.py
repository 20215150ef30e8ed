"""The state of elastic training for PyTorch."""

from choros.torch.elastic import StateHandler, TorchState, get_handler_registry, set_handler_registry

__all__ = ["StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]
