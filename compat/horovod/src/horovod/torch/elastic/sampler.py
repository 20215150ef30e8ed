"""The sampler of elastic training for PyTorch."""

from choros.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
